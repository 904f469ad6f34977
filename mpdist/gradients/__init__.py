"""Gradients: averaging over the ranks, in buckets, for arrays of any library."""

from mpdist.gradients.average import average
from mpdist.gradients.averager import GradientAverager
from mpdist.gradients.buckets import BUCKET_BYTES, agreed_order, assign_buckets

__all__ = ["BUCKET_BYTES", "GradientAverager", "agreed_order", "assign_buckets", "average"]
