"""Errors, sorted by who can repair them.

Every text names the operation, the communicator, the rank, what was got, what
was needed and what to do; values that a program may want are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MpdistError(Exception):
    """Base of everything that mpdist raises on purpose."""


class UsageError(MpdistError, ValueError):
    """The call is wrong; the rank that made it can correct it, nothing was sent."""


class UnsupportedBuffer(UsageError):
    """The array's memory or element type cannot be communicated as it is."""


class SizeMismatch(UsageError):
    """Two sizes that must agree do not."""


class InvalidRank(UsageError):
    """A rank outside the communicator."""


class ClosedError(MpdistError):
    """The communicator, or mpdist itself, is closed."""


class CommunicationError(MpdistError):
    """The operation was right, but could not be carried out."""


class DeviceFailed(CommunicationError):
    """A copy from or to the memory of a device has failed."""


class MessageTruncated(CommunicationError):
    """A message is larger than the buffer given for it; it stays queued for a larger one."""


class RankFailed(CommunicationError):
    """Ranks were lost.

    Attributes:
        ranks: the lost ranks, in this communicator's numbering.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class CommRevoked(CommunicationError):
    """The communicator was given up by one of its members."""


class CollectiveMismatch(MpdistError):
    """Ranks called different collectives, or the same with different arguments.

    Attributes:
        calls: rank -> what that rank called, with its line.
    """

    def __init__(self, text: str, calls: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.calls = dict(calls or {})


class WorkTimeout(MpdistError, TimeoutError):
    """An operation took longer than allowed.

    Attributes:
        work: the operation.
        waiting_for: ranks that have not come, as far as known.
    """

    def __init__(self, text: str, work: object = None, waiting_for: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.work = work
        self.waiting_for = tuple(waiting_for)


class Unavailable(MpdistError, NotImplementedError):
    """This MPI, device or installation cannot do it."""
