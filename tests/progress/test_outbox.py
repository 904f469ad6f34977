"""Outbox: what waits behind data on their way goes once, whatever happens meanwhile; pure, the channel a list."""

from __future__ import annotations

from typing import Any

import pytest

from mpdist.errors import DeviceFailed
from mpdist.progress import wire
from mpdist.progress.outbox import Outbox


class Done:
    def Test(self) -> bool:
        return True


class Mark:
    """Data on their way."""

    has_come = False
    error: DeviceFailed | None = None

    def Test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.has_come


class Fastboxes:
    are_ended = False

    def end(self) -> None:
        self.are_ended = True


class Channel:
    def __init__(self) -> None:
        self.fastboxes = Fastboxes()
        self.posted: list[int] = []
        self.interruptions = 0
        self.given_up = ""

    def isend(self, spec: list[Any], dst: int, wire_tag: int) -> Done:
        self.posted.append(wire_tag)
        return Done()

    def ring(self, dst: int) -> None:
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt

    def give_up(self, why: str) -> None:
        self.given_up = why


def held(*tags: int) -> tuple[Channel, Outbox, Mark, list[Any]]:
    channel: Any = Channel()
    outbox, mark = Outbox(channel), Mark()
    assert channel.fastboxes.are_ended  # what goes there would overtake what waits here
    outbox.hold(mark)
    requests = [channel.isend([b"", 0, None], 1, tag) for tag in tags]
    assert not any(request.Test() for request in requests)
    assert not channel.posted
    return channel, outbox, mark, requests


def test_messages_go_in_their_order_when_the_data_have_come() -> None:
    channel, _, mark, requests = held(1, 2, 3)
    assert not requests[2].Test()
    mark.has_come = True
    assert all(request.Test() for request in requests)
    assert channel.posted == [1, 2, 3]
    assert channel.isend([], 0, 4).Test()
    assert channel.posted == [1, 2, 3, 4]


def test_an_interruption_posts_nothing_twice() -> None:
    channel, outbox, mark, requests = held(1, 2)
    mark.has_come = True
    channel.interruptions = 2
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            outbox.advance()
    assert all(request.Test() for request in requests)
    assert channel.posted == [1, 2]


def test_where_data_cannot_be_had_only_the_last_message_goes() -> None:
    last = wire.wire_tag(0, wire.LAST)
    channel, _, mark, requests = held(wire.wire_tag(5, 1), last)
    mark.error = DeviceFailed("gone")
    assert requests[1].Test()
    with pytest.raises(DeviceFailed, match="gone"):
        requests[0].Test()
    assert channel.posted == [last]
    assert "gone" in channel.given_up
