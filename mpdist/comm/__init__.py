"""Communicator: what the user holds."""

from mpdist.comm.communicator import Communicator
from mpdist.comm.wildcards import ANY_SOURCE, ANY_TAG

__all__ = ["ANY_SOURCE", "ANY_TAG", "Communicator"]
