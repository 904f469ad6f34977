"""Mailbox: which receive gets which message. Data in, data out, no MPI.

MPI's rule: a message goes to the earliest posted receive that it matches, a
receive takes the earliest arrived message that it matches. Receives wait under
their own pattern, so a message looks at no more than four queues; messages that
nobody wants yet wait under all four patterns that may ask for them, and are
dropped from three of them lazily. A receive that waits alone, the usual case,
waits in `sole`, where it is met without a queue.

A signal's handler may raise after any call in here. `match` makes none once it has
changed something, so whoever is met is returned, nor does `post`, so a receive waits, or was not
posted; `keep` and `restore` may be repeated: what is in its place already is not put there again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

ANY: Final = -1
"""Pattern that matches every source or tag; never seen by the user."""

_Key = tuple[int, int]


class Entry(Protocol):
    """What waits in a mailbox.

    The mailbox owns `order`: > 0 while it waits, its place; not positive when it does not: what a receive had when
    it was matched, and a message when it was taken, negated.
    """

    src: int
    tag: int
    order: int


R = TypeVar("R", bound=Entry)
M = TypeVar("M", bound=Entry)


class Mailbox(Generic[R, M]):
    """Posted receives and unclaimed messages of one communicator.

    Attributes:
        receives: number of receives waiting.
        messages: number of messages waiting.
        sole: the receive that waits, if only one does and it is in no queue.
    """

    def __init__(self) -> None:
        self.receives = 0
        self.messages = 0
        self.sole: R | None = None
        self._clock = 0
        self._posted: dict[_Key, deque[R]] = {}
        self._patterns = 0  # posted receives with a wildcard
        self._withdrawn = 0  # receives still in a queue that do not wait any more
        self._kept: dict[_Key, deque[M]] = {}
        self._stale = 0  # places in the queues of messages that were taken

    # ------------------------------------------------------------------ receives

    def post(self, receive: R) -> None:
        """Let a receive wait."""
        if not self.receives:
            self.receives = receive.order = 1
            self.sole = receive
            return
        sole = self.sole
        if sole is not None:
            self._queue(sole)
            self.sole = None
        self._queue(receive)
        self.receives += 1

    def _queue(self, receive: R) -> None:
        key = (receive.src, receive.tag)
        queue = self._posted.get(key)
        if queue is None:
            queue = self._posted[key] = deque()
        # No call from here on, nor in `post` after it.
        self._clock += 1
        receive.order = self._clock
        queue += (receive,)
        if receive.src < 0 or receive.tag < 0:
            self._patterns += 1

    def match(self, src: int, tag: int) -> R | None:
        """Take the earliest posted receive for a message from `src` with `tag`."""
        sole = self.sole
        if sole is not None:
            if (sole.src == src or sole.src < 0) and (sole.tag == tag or sole.tag < 0):
                self.take_sole()
                return sole
            return None
        if not self.receives:
            return None
        if self._patterns:
            return self._match_patterns(src, tag)
        queue = self._posted.get((src, tag))
        if queue is None:
            return None
        return self._pop(queue, (src, tag))

    def take_sole(self) -> None:
        """The sole receive has met its message."""
        assert self.sole is not None
        self._clock += 1
        self.sole.order = -self._clock  # as in _leave
        self.sole = None
        self.receives = 0

    def _match_patterns(self, src: int, tag: int) -> R | None:
        best: tuple[int, _Key] | None = None
        for key in _keys(src, tag):
            queue = self._posted.get(key)
            while queue and queue[0].order <= 0:
                queue.popleft()
            if queue and (best is None or queue[0].order < best[0]):
                best = (queue[0].order, key)
        return None if best is None else self._pop(self._posted[best[1]], best[1])

    def _pop(self, queue: deque[R], key: _Key) -> R | None:
        while queue:
            receive = queue[0]
            if receive.order > 0:
                self._leave(receive)
                del queue[0]  # no call from here on
                if not queue:
                    del self._posted[key]
                return receive
            del queue[0]
        del self._posted[key]
        return None

    def _leave(self, receive: R) -> None:
        self._clock += 1
        receive.order = -self._clock  # the place of the message that it meets, should that be restored
        self.receives -= 1
        if receive.src < 0 or receive.tag < 0:
            self._patterns -= 1

    def withdraw(self, receive: R) -> bool:
        """Take a waiting receive back; False if it does not wait any more."""
        if receive.order <= 0:
            return False
        if receive is self.sole:
            self.take_sole()
            return True
        self._leave(receive)
        self._withdrawn += 1
        if self._withdrawn > 64 + self.receives:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Drop withdrawn receives; as rare as there are waiting ones, so each costs O(1)."""
        self._withdrawn = 0
        for key, queue in list(self._posted.items()):
            live = deque(receive for receive in queue if receive.order > 0)
            if live:
                self._posted[key] = live
            else:
                del self._posted[key]

    def waiting(self) -> Iterator[R]:
        """The receives that wait."""
        if self.sole is not None:
            yield self.sole
        for queue in list(self._posted.values()):
            yield from (receive for receive in list(queue) if receive.order > 0)

    # ------------------------------------------------------------------ messages

    def keep(self, message: M) -> None:
        """Let a message wait that no receive wants yet."""
        if message.order:  # it was interrupted
            self.restore(message)
            return
        self._clock += 1
        message.order = -self._clock
        for key in _keys(message.src, message.tag):
            queue = self._kept.get(key)
            if queue is None:
                queue = self._kept[key] = deque()
            queue.append(message)
        message.order = -message.order
        self.messages += 1

    def find(self, src: int, tag: int) -> M | None:
        """The earliest kept message for a receive with this pattern; it stays."""
        queue = self._kept.get((src, tag))
        while queue:
            if queue[0].order > 0:
                return queue[0]
            queue.popleft()
            self._stale -= 1
        return None

    def remove(self, message: M) -> None:
        """Take a kept message out."""
        message.order = -message.order  # remembered for `restore`
        self.messages -= 1
        self._stale += 4
        if self._stale > 64 + 8 * self.messages:
            self._rebuild(list(self.unclaimed()))

    def restore(self, message: M) -> None:
        """Put a message back where it was: its receive was cancelled."""
        if message.order > 0:
            return
        place = abs(message.order)
        for key in _keys(message.src, message.tag):
            queue = self._kept.get(key)
            if queue is None:
                queue = self._kept[key] = deque()
            index = 0 if not queue or abs(queue[0].order) > place else bisect_left(queue, place, key=_place)
            if index < len(queue) and queue[index] is message:
                self._stale -= 1
            else:
                queue.insert(index, message)
        message.order = place
        self.messages += 1

    def _rebuild(self, messages: list[M]) -> None:
        kept: dict[_Key, deque[M]] = {}
        for message in messages:
            for key in _keys(message.src, message.tag):
                kept.setdefault(key, deque()).append(message)
        self._kept = kept
        self._stale = 0

    def unclaimed(self) -> Iterator[M]:
        """The messages that nobody has received, in order of arrival."""
        return (message for message in list(self._kept.get((ANY, ANY), ())) if message.order > 0)

    def next_order(self) -> int:
        """The place of a message that arrives now and is not kept, in case it must be restored."""
        self._clock += 1
        return self._clock


def _place(entry: Entry) -> int:
    """Where it lies in its queues, be it taken or not: they are ordered by this."""
    return abs(entry.order)


def _keys(src: int, tag: int) -> tuple[_Key, _Key, _Key, _Key]:
    return (src, tag), (src, ANY), (ANY, tag), (ANY, ANY)
