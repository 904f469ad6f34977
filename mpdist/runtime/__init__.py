"""Runtime: starts everything, ends it, and decides what a failure means."""

from mpdist.runtime.job import describe_pending, finalize, init, run

__all__ = ["describe_pending", "finalize", "init", "run"]
