"""Errors: mpdist's, as torch's users expect them.

torch's own backends raise a DistBackendError, which is a RuntimeError, for what goes wrong on the way, and
programs catch that. The text, and mpdist's own error as the cause, stay.
"""

from __future__ import annotations

from asyncio import CancelledError

import torch.distributed as dist

from mpdist.errors import ClosedError, CommunicationError, MpdistError, UsageError, WorkTimeout
from mpdist.progress.work import Work

_BACKEND_ERROR: type[Exception] = getattr(dist, "DistBackendError", RuntimeError)


class OperationTimeout(WorkTimeout, _BACKEND_ERROR):  # type: ignore[valid-type,misc]  # torch's class, if it has it
    """An operation took longer than its group's timeout, or than `wait` was told.

    Attributes:
        work: mpdist's Work.
        waiting_for: ranks of the group that have not come.
    """


class OperationFailed(_BACKEND_ERROR):  # type: ignore[valid-type,misc]
    """The operation could not be carried out; `__cause__` is mpdist's error."""


class WrongCall(UsageError, RuntimeError):
    """The call is wrong; nothing was sent."""


def translated(error: BaseException) -> BaseException:
    """The error to raise for one of mpdist's."""
    if isinstance(error, OperationTimeout | OperationFailed | WrongCall):
        return error
    if isinstance(error, WorkTimeout):
        new: Exception = OperationTimeout(f"mpdist: Timed out : {error}", error.work, error.waiting_for)
    elif isinstance(error, UsageError):
        new = WrongCall(str(error))
    elif isinstance(error, ClosedError):
        new = OperationFailed(f"the group is closed : {error}")
    elif isinstance(error, CancelledError):  # which `except Exception` does not catch
        new = OperationTimeout(f"mpdist: Timed out : {error}, when an earlier wait for it ended")
    elif isinstance(error, MpdistError | CommunicationError):
        new = OperationFailed(str(error))
    else:
        return error
    new.__cause__ = error
    return new


def late(work: Work[object], text: str) -> OperationTimeout:
    """The error of a wait that ended before its operation did."""
    return OperationTimeout(f"mpdist: Timed out : {text}", work)
