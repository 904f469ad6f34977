"""What all operations of a communicator share: its channel, and errors that say where they happened."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from numpy import ndarray

from mpdist.comm.staged_calls import staged
from mpdist.errors import InvalidRank, MpdistError, UnsupportedBuffer, UsageError
from mpdist.memory import HOST, Buffer, as_buffer
from mpdist.progress.interruption import is_of_handler

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Program
    from mpdist.progress.work import Work

# What `_explained` puts in front of an error.
_NAMES_PLACE = re.compile(r"\w+ on '")

# What the numbers stand for that other libraries have below 0.
_NEGATIVE = {
    "src": "; from any rank is mpdist.ANY_SOURCE",
    "dst": "; to no rank is no call",
    "tag": "; any tag is mpdist.ANY_TAG",
}

Self = TypeVar("Self", bound="Operations")
P = ParamSpec("P")
R = TypeVar("R")


# Memory of others could be resized: a bytearray, say, which can't be as long as there is a view of it.
_FIXED = frozenset({ndarray, bytes, type(None)})


def host_buffer(x: object, *, writable: bool = False) -> Buffer:
    """as_buffer for memory that MPI can reach, and that stays as it is as long as there is the Buffer.

    Raises:
        OnDevice: it is not; whoever takes such arrays goes another way, see staged_calls.py.
    """
    buffer = as_buffer(x, writable=writable)
    if buffer.device is not HOST:
        raise OnDevice(f"got an array on {buffer.device}; needed host memory: copy it there first")
    if type(x) is not ndarray and type(buffer) is Buffer and type(buffer.exporter) not in _FIXED:
        buffer.exporter = buffer.array()
    return buffer


class OnDevice(UnsupportedBuffer):
    """An array is in memory that only its device reaches."""


class Operations:
    """Base of the groups of operations.

    Attributes:
        rank: this process's number in the communicator.
        size: number of members.
    """

    rank: int
    size: int
    _channel: Channel

    def _post_with_headers(self, op: str, program: Program, details: Callable[[], str], *arguments: Any) -> Work[Any]:
        """Post what begins with sizes for the others: its steps compare no calls, so its details are compared."""
        work: Work[Any] = self._channel.post(op, program, details, *arguments, is_unchecked=True)
        return work

    def _rank(self, value: object, what: str) -> int:
        """A rank of this communicator; raises InvalidRank."""
        if type(value) is int and 0 <= value < self.size:
            return value
        try:
            rank = index(value)  # type: ignore[arg-type]  # anything that is an integer
        except TypeError:
            raise InvalidRank(f"{what} must be a rank, an integer from 0 to {self.size - 1}, got {value!r}") from None
        if not 0 <= rank < self.size:
            raise InvalidRank(
                f"{what} is {rank}, the ranks of this communicator are 0 to {self.size - 1}"
                f"{_NEGATIVE.get(what, '') if rank < 0 else self._launch_advice()}"
            )
        return rank

    def _launch_advice(self) -> str:
        from mpdist.transport.facts import launched_as  # for this text only

        if self.size > 1 or self._channel.name != "world" or launched_as(os.environ) is not None:
            return ""
        return ": this program was started without a launcher. For two, start it by `mpirun -n 2 python ...`"

    def _tag(self, value: object) -> int:
        """A tag; raises UsageError."""
        limit = self._channel.max_tag
        try:
            tag = index(value)  # type: ignore[arg-type]  # anything that is an integer
        except TypeError:
            raise UsageError(f"tag must be an integer from 0 to {limit}, got {value!r}") from None
        if not 0 <= tag <= limit:
            raise UsageError(f"tag is {tag}, tags are 0 to {limit}{_NEGATIVE['tag'] if tag < 0 else ''}")
        return tag

    def _explained(self, op: str, error: UsageError) -> UsageError:
        """The error with the place in front, unless it names it."""
        if _NAMES_PLACE.match(str(error)):
            return error
        text = f"{op} on {self._channel.where()}: {error}"
        return type(error)(text)


def operation(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Let the errors of a method say operation, communicator and rank, and let it take arrays on a device."""
    op = method.__name__.lstrip("_")

    @functools.wraps(method)
    def explained(self: Self, *args: P.args, **kwargs: P.kwargs) -> R:
        before = self._channel.sequence
        try:
            try:
                return method(self, *args, **kwargs)
            except OnDevice:
                pass
            return staged(self, method, args, kwargs)  # type: ignore[no-any-return]  # what the method returns
        except UsageError as error:
            raise self._explained(op, error) from error.__cause__
        except BaseException as error:
            if self._channel.sequence != before and is_of_handler(error):
                self._channel.lost_hold_of(op)
            if isinstance(error, Exception) and not isinstance(error, MpdistError):  # of an object's own code, mostly
                with suppress(Exception):  # some take none
                    error.add_note(f"in {op} on {self._channel.where()}")
            raise

    return explained  # type: ignore[return-value]  # functools.wraps hides that it is a method
