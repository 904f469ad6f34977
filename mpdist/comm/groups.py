"""Groups: communicators made of others, and their end."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpdist.algorithms import closing, groups
from mpdist.comm.operation import Operations, operation
from mpdist.errors import InvalidRank, UsageError
from mpdist.progress.callback import when_done
from mpdist.progress.channel import Dropped
from mpdist.progress.collective import Collective
from mpdist.progress.work import Work

if TYPE_CHECKING:
    from mpdist.comm.communicator import Communicator
    from mpdist.progress.channel import Channel
    from mpdist.transport.mpi import Transport


_LARGEST = 2**31 - 1  # of the colors and keys of MPI
_MOST_NAMED = 4


class Joined(Collective[Any]):
    """A communicator that is being made: await it, or use it in `async with`."""

    async def __aenter__(self) -> Any:
        try:
            return await self
        except BaseException:  # the block never begins, so nothing else will end what the others make with this rank
            when_done(self, Joined._leave_unentered)
            raise

    def _leave_unentered(self) -> None:
        if self._error is None and self._result is not None:
            self._result._leave("the await of its making was cancelled")

    async def __aexit__(self, *error: Any) -> None:
        part = self.result()
        if part is not None:
            await part.__aexit__(*error)

    def _came_late(self, result: Any) -> None:
        if result is not None:
            result._leave("its making was given up")


class Closed(Work[None]):
    """The end of a communicator that was closed without the others."""

    op = "close"
    _done = True
    _result = None

    def __init__(self, channel: Channel) -> None:
        self._channel = channel


class Groups(Operations):
    """Making communicators, and closing them."""

    _subgroups_made: dict[tuple[int, ...], int]

    @operation
    def split(self, color: int | None, key: int = 0) -> Joined:
        """One communicator for each color; its ranks are ordered by `key`, then by rank here.

        MPI makes it in a call that all members must be in: the last to come waits there until the others look.

        Args:
            color: 0 to 2**31 - 1; None: in none, the result is None.
            key: of as many bits.

        Returns:
            An awaitable of the communicator, also `async with comm.split(...) as part:`.
        """
        if color is not None:
            color = _integer(color, "color")
            if not 0 <= color <= _LARGEST:
                raise UsageError(f"color is {color}; a color is 0 to {_LARGEST}, and None for no communicator")
        key = _integer(key, "key")
        if not -_LARGEST <= key <= _LARGEST:
            raise UsageError(f"key is {key}; it must be {-_LARGEST} to {_LARGEST}")
        channel = self._channel
        make = self._maker(f"{self.name}/split{channel.sequence + 1}:{color}")
        return channel.post(
            "split",
            groups.split,
            lambda: f"color {color}",
            channel.engine,
            make,
            color,
            key,
            kind=Joined,
            is_unchecked=True,
        )

    @operation
    def dup(self) -> Joined:
        """The same ranks again, with messages and an order of collectives of their own."""
        channel = self._channel
        make = self._maker(f"{self.name}/dup{channel.sequence + 1}")
        return channel.post("dup", groups.dup, str, channel.engine, make, kind=Joined, is_unchecked=True)

    @operation
    def subgroup(self, ranks: Sequence[int]) -> Joined:
        """A communicator of these ranks, in this order; only they call it."""
        self._channel.check_usable("subgroup")
        try:
            listed = list(ranks)
        except TypeError:
            raise UsageError(f"ranks must be a sequence of ranks, got {ranks!r}") from None
        members = tuple(self._rank(rank, f"ranks[{place}]") for place, rank in enumerate(listed))
        if len(set(members)) != len(members):
            raise InvalidRank(f"ranks is {list(members)}: a rank must not appear twice")
        if self.rank not in members:
            raise InvalidRank(f"ranks is {list(members)}: only members call subgroup, and rank {self.rank} is none")
        number = self._subgroups_made.get(members, 0) + 1
        name = f"{self.name}/ranks{'-'.join(map(str, members))}#{number}"
        meeting = self._channel.engine.meeting
        self._subgroups_made[members] = number
        steps = groups.subgroup(self._channel.transport, self._channel, meeting, self._maker(name), members, name)
        words = f"of ranks {list(members)} of '{self.name}'"
        return meeting.post_apart(Joined(meeting, "subgroup", steps, lambda: words))

    def _maker(self, name: str) -> Callable[[Transport], Communicator]:
        return lambda transport: self._member(transport, name)

    def _member(self, transport: Transport, name: str) -> Communicator:
        raise NotImplementedError

    name: str
    ranks: tuple[int, ...]

    # ------------------------------------------------------------------ the end

    @operation
    def close(self) -> Work[None]:
        """Close the communicator; all members do. Its later use raises ClosedError.

        Messages that nobody has received are reported on stderr; iterators over `messages` end, and a task that has
        not had its turn yet gets none: `async with` lets it begin. Where it refuses
        use because its ranks may be out of step, or others have left it by an exception, it is closed here only.
        Sends whose await has ended early, by a timeout perhaps, are completed before.

        Returns:
            A Work of None, done when all members have called it.

        Raises:
            UsageError: operations are pending here; it stays usable.
        """
        channel = self._channel
        if channel.broken and not channel.is_closed:
            self._leave("it was closed")
            return Closed(channel)
        completed = {*channel.inbox.listeners(), *channel.abandoned_sends()}
        pending = [work for work in channel.unfinished() if work not in completed]
        if pending:
            listed = _listed([work.describe() for work in pending])
            are = "operation is" if len(pending) == 1 else "operations are"
            raise UsageError(f"{len(pending)} {are} pending ({listed}); await or cancel them before")
        return self._close()

    def _close(self) -> Work[None]:
        channel = self._channel
        closed = partial(self._closed, "it was closed")
        work: Work[None] = channel.post("close", closing.close, str, channel, self._open_node(), closed)
        if not work._done:
            channel.refuse("close() was called")
        return work

    def _open_node(self) -> closing.Node | None:
        """Its communicator of the node, which is used through it, and closed with it."""
        node = self._node
        if node is None or node._channel.is_closed or node._channel.broken:
            return None
        return closing.Node(node._channel, [self.ranks.index(rank) for rank in node.ranks], node._close)

    def _leave(self, why: str) -> None:
        """Close it here, and tell the others, which may close it well."""
        closing.leave(self._channel)
        self._closed(why)

    def _closed(self, why: str, together: bool = False) -> None:
        """Close it here; its communicator of the node too, if that is not closed yet."""
        if self._node is not None and not self._node._channel.is_closed:
            self._node._closed(why)
        unclaimed = self._channel.inbox.unclaimed()
        if unclaimed:
            print(
                f"mpdist: {self._channel.where()} is closed with {len(unclaimed)} messages that nobody received: "
                f"{_listed(unclaimed)}",
                file=sys.stderr,
            )
        self._channel.close(why, together)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception only here, waiting for nobody.

        Sends and collectives that are pending are completed before; receives that no message has met by the time
        all members have come end with ClosedError.
        """
        closing = None
        try:
            if kind is None:
                await self._let_messages_be_taken()
        finally:
            if not self._channel.is_closed:
                if kind is not None or self._channel.broken:
                    self._leave(f"it was left by {kind.__name__ if kind else 'the end of its block'}")
                else:
                    closing = self._close()
        if closing is not None:
            await closing

    async def _let_messages_be_taken(self) -> None:
        """Give turns to tasks that take messages, one that has not begun, too, as long as each takes any."""
        left = sys.maxsize
        while True:
            await asyncio.sleep(0)
            if self._channel.broken:
                return
            waiting = self._channel.inbox.take_in()
            if not waiting or waiting >= left:
                return
            left = waiting

    def __reduce__(self) -> NoReturn:
        """Neither copied nor pickled: a copy that goes would close what this one still uses."""
        raise TypeError(
            "a communicator belongs to its process, and cannot be copied or pickled; dup() makes another one of the "
            "same ranks"
        )

    def __del__(self) -> None:
        if self._drop() and not self._is_node:
            words = f"communicator {self._channel.where()} was never closed"
            warnings.warn(words, ResourceWarning, stacklevel=2, source=self)

    def _drop(self) -> bool:
        """Have it closed when the ranks make another one, once all members have dropped it; nobody uses it any more.

        Somebody may still use its communicator of the node, which from now on is dropped by itself.

        Returns:
            False where there is nothing to close.
        """
        channel = getattr(self, "_channel", None)
        if channel is None or channel.is_closed or sys.is_finalizing() or self._owner_pid != os.getpid():
            return False
        channel.engine.dropped.append(Dropped(channel, self._close))
        self._node = None
        return True

    _is_node = False
    """Whether it is another's communicator of the node, which nobody has to close."""
    _owner_pid: int
    _node: Communicator | None


def _integer(value: object, what: str) -> int:
    try:
        return index(value)  # type: ignore[arg-type]  # anything that is an integer
    except TypeError:
        raise UsageError(f"{what} must be an integer, got {value!r}") from None


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return f"{'; '.join(texts[:_MOST_NAMED])}{f'; and {more} more' if more > 0 else ''}"
