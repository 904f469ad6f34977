"""Runtime: starts everything, ends it, and decides what a failure means."""

from mpdist.runtime.answers import describe_pending
from mpdist.runtime.job import finalize, init, run, started

__all__ = ["describe_pending", "finalize", "init", "run", "started"]
