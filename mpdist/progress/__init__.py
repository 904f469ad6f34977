"""Progress: pending operations on one side, asyncio and threads on the other."""

from mpdist.progress.message import Message
from mpdist.progress.work import Work

__all__ = ["Message", "Work"]
