"""Runtime: starts everything, ends it, and decides what a failure means."""

from mpdist.runtime.job import finalize, init, run

__all__ = ["finalize", "init", "run"]
