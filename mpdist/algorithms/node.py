"""Node: making the communicator of a node's members, for which its user waits without awaiting.

Two ranks may ask for those of two communicators in different order, and each would
hold up what the other waits for. So a rank tells all members what it asks for, and
while it waits it takes part in whatever else they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from mpdist.algorithms.groups import Blocking, Make
from mpdist.algorithms.meeting import tag_of
from mpdist.memory import as_buffer
from mpdist.progress.mailbox import ANY
from mpdist.progress.receive import Receive
from mpdist.progress.sending import send

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps

Join = Callable[[str], None]
"""Takes part in the making for the communicator of this name, if there is one here that lacks it."""

# For each channel: who has asked for the nodes of which communicators, that are not made yet.
_asked: WeakKeyDictionary[Channel, dict[str, set[int]]] = WeakKeyDictionary()


def make_node(meeting: Channel, members: Sequence[int], name: str, make: Make, join: Join) -> Steps[object]:
    """The communicator of the members on this node.

    Args:
        meeting: the channel of the world for it.
        members: their ranks in the world, this one among them; the same on all.
        name: of the communicator whose members they are.
        join: called for all others that are asked for meanwhile.
    """
    engine = meeting.engine
    others = [member for member in members if member != meeting.rank]
    engine.creating += 1
    try:
        for member in others:
            _ask(meeting, member, name)
        yield Asked(meeting, members, name, join)
        call = Blocking(engine, lambda: engine.maker.subgroup(members, tag_of(meeting, f"the node of {name}")))
        yield call
    finally:
        engine.creating -= 1
    return make(call.result())


def _tag(meeting: Channel) -> int:
    """Of what a rank asks for; `tag_of` gives lower ones."""
    return meeting.max_tag


def _ask(meeting: Channel, member: int, name: str) -> None:
    send(meeting, as_buffer(np.frombuffer(name.encode(), np.uint8)), member, _tag(meeting))


class Asked:
    """All members have asked for it, as a request."""

    def __init__(self, meeting: Channel, members: Sequence[int], name: str, join: Join) -> None:
        self._meeting = meeting
        self._others = [member for member in members if member != meeting.rank]
        self._name = name
        self._join = join
        self._by_name = _asked.setdefault(meeting, {})
        self._receive = self._posted()

    def _posted(self) -> Receive:
        receive = Receive(self._meeting, None, ANY, _tag(self._meeting))
        self._meeting.inbox.receive(receive)
        return receive

    @property
    def missing(self) -> list[int]:
        """Members that have not asked yet."""
        come = self._by_name.get(self._name, set())
        return [member for member in self._others if member not in come]

    def Test(self) -> bool:
        while self._receive._done or self._receive._poll():
            message = self._receive.result()
            self._by_name.setdefault(message.data.tobytes().decode(), set()).add(message.src)
            self._receive = self._posted()
        for name in [name for name in self._by_name if name != self._name]:
            self._join(name)
        if self.missing:
            return False
        self._by_name.pop(self._name, None)
        self._receive._give_up()
        return True
