"""The mailbox against a reference that searches plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from time import process_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpdist.progress.mailbox import ANY, Mailbox

SOURCES = [0, 1, 2]
TAGS = [0, 1]


@dataclass(eq=False)
class Entry:
    """A receive's pattern or a message's envelope."""

    src: int
    tag: int
    order: int = 0


def fits(receive: Entry, message: Entry) -> bool:
    return receive.src in (ANY, message.src) and receive.tag in (ANY, message.tag)


class Comparison(RuleBasedStateMachine):
    """Posts, arrivals, withdrawals and returns in any order.

    `posted` and `kept` are the reference: receives in order of posting, messages in order of arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self.box: Mailbox[Entry, Entry] = Mailbox()
        self.posted: list[Entry] = []
        self.arrived: list[Entry] = []
        self.kept: list[Entry] = []
        self.taken: list[Entry] = []
        self.left: list[Entry] = []

    @initialize(number=st.integers(0, 300), tag=st.sampled_from(TAGS))
    def start_with_many_withdrawn(self, number: int, tag: int) -> None:
        """So that sweeps and rebuilds happen within short sequences."""
        for _ in range(number):
            receive = Entry(0, tag)
            self.box.post(receive)
            assert self.box.withdraw(receive)
            self.box.keep(message := Entry(1, tag))
            self.box.remove(message)

    @rule(src=st.sampled_from([*SOURCES, ANY]), tag=st.sampled_from([*TAGS, ANY]))
    def receive(self, src: int, tag: int) -> None:
        """A receive takes the earliest message that it matches, or waits."""
        receive = Entry(src, tag)
        wanted = next((message for message in self.kept if fits(receive, message)), None)
        found = self.box.find(src, tag)
        assert found is wanted
        if found is None:
            self.box.post(receive)
            self.posted.append(receive)
            return
        self.box.remove(found)
        self.kept.remove(found)
        self.taken.append(found)

    @rule(src=st.sampled_from(SOURCES), tag=st.sampled_from(TAGS))
    def arrive(self, src: int, tag: int) -> None:
        """A message goes to the earliest receive that it matches, or is kept."""
        message = Entry(src, tag)
        wanted = next((receive for receive in self.posted if fits(receive, message)), None)
        found = self.box.match(src, tag)
        assert found is wanted
        if found is None:
            self.box.keep(message)
            self.kept.append(message)
            self.arrived.append(message)
            return
        self.posted.remove(found)
        self.left.append(found)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        receive = data.draw(st.sampled_from(self.posted))
        assert self.box.withdraw(receive)
        self.posted.remove(receive)
        self.left.append(receive)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def withdraw_what_does_not_wait(self, data: st.DataObject) -> None:
        assert not self.box.withdraw(data.draw(st.sampled_from(self.left)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A message that was taken comes back to its old place."""
        message = data.draw(st.sampled_from(self.taken))
        self.taken.remove(message)
        self.box.restore(message)
        self.kept = [each for each in self.arrived if each in self.kept or each is message]

    @invariant()
    def counts_and_lists_agree(self) -> None:
        assert self.box.receives == len(self.posted)
        assert self.box.messages == len(self.kept)
        assert list(self.box.unclaimed()) == self.kept
        assert set(self.box.waiting()) == set(self.posted)


TestMailboxAgreesWithTheReference = Comparison.TestCase
TestMailboxAgreesWithTheReference.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("pattern", [(0, 0), (ANY, 0), (0, ANY), (ANY, ANY)])
def test_ten_thousand_waiting_receives_are_met_in_order(pattern: tuple[int, int]) -> None:
    box: Mailbox[Entry, Entry] = Mailbox()
    receives = [Entry(*pattern) for _ in range(10_000)]
    for receive in receives:
        box.post(receive)
    assert [box.match(0, 0) for _ in receives] == receives
    assert box.match(0, 0) is None
    assert not list(box.waiting())


@pytest.mark.parametrize("forwards", [True, False])
def test_ten_thousand_messages_come_back_soon(forwards: bool) -> None:
    """Where each one that came back had the queues made anew it took minutes."""
    box: Mailbox[Entry, Entry] = Mailbox()
    messages = [Entry(0, 0) for _ in range(20_000)]
    for message in messages:
        box.keep(message)
    taken = []
    for _ in range(10_000):
        message = box.find(0, 0)
        assert message is not None
        box.remove(message)
        taken.append(message)
    start = process_time()
    for message in taken if forwards else reversed(taken):
        box.restore(message)
    assert process_time() - start < 10
    assert list(box.unclaimed()) == messages
    for message in messages:
        assert box.find(0, 0) is message
        box.remove(message)


def test_withdrawn_receives_and_taken_messages_take_no_memory() -> None:
    box: Mailbox[Entry, Entry] = Mailbox()
    for number in range(10_000):
        receive, message = Entry(number, ANY), Entry(number, 3)
        box.post(receive)
        box.withdraw(receive)
        box.keep(message)
        box.remove(message)
    places = sum(len(queue) for queue in [*box._posted.values(), *box._kept.values()])
    assert places < 1000
    assert len(box._posted) < 1000


def test_a_message_that_was_matched_at_once_returns_before_later_ones() -> None:
    box: Mailbox[Entry, Entry] = Mailbox()
    early, receive, late = Entry(0, 0), Entry(0, 0), Entry(0, 0)
    box.keep(early)
    box.post(receive)
    matched = Entry(0, 0)
    assert box.match(0, 0) is receive
    matched.order = receive.order  # its place, as Receive does when it gives a message back
    box.keep(late)
    box.restore(matched)
    assert list(box.unclaimed()) == [early, matched, late]
