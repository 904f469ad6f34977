"""Ticket: what the sender and the receiver of a shown message tell each other."""

from __future__ import annotations

from mpdist.memory.sharing import Export
from mpdist.memory.slots import Slots, block_bytes, proof_at, proof_of, spans
from mpdist.progress.shown.ticket import FAILED, OVER, TAKEN, WORDS, Ticket


def pair() -> tuple[Ticket, Ticket]:
    words = memoryview(bytearray(8 * WORDS)).cast("q")
    return Ticket(words), Ticket(words)


def test_an_array_that_is_read_where_it_is() -> None:
    sender, receiver = pair()
    assert receiver.ready() == 0
    sender.tell_ready()
    assert receiver.ready() == 1
    assert not sender.is_over()
    receiver.words[TAKEN] = OVER
    assert sender.is_over()
    assert not sender.is_asked()


def test_an_array_that_comes_through_slots() -> None:
    sender, receiver = pair()
    sender.tell_ready()
    receiver.ask()
    assert sender.is_asked()
    for number in (1, 2, 3):
        sender.tell_filled(number)
        assert receiver.filled() == number
        receiver.tell_taken(number)
        assert sender.taken() == number
        assert not sender.is_over()
    receiver.words[TAKEN] = OVER
    assert sender.is_over()
    assert sender.taken() == OVER


def test_a_sender_that_has_failed_says_so_wherever_the_receiver_waits() -> None:
    sender, receiver = pair()
    sender.tell_failed()
    assert receiver.ready() == receiver.filled() == FAILED


def test_every_word_is_told_behind_a_fence_and_looked_at_before_one() -> None:
    words = memoryview(bytearray(8 * WORDS)).cast("q")
    seen = []
    ticket = Ticket(words, lambda: seen.append(words.tolist()))
    ticket.tell_ready()
    assert seen == [[0, 0, 0, 0]]
    assert ticket.ready() == 1
    assert seen == [[0, 0, 0, 0], [1, 0, 0, 0]]


def test_spans_cover_an_array_and_use_the_slots_in_turn() -> None:
    slot = proof_at() // 2
    assert spans(2 * slot + 5) == [(0, 0, slot), (slot, slot, 2 * slot), (0, 2 * slot, 2 * slot + 5)]
    assert spans(3) == [(0, 0, 3)]
    assert spans(0) == []


def test_what_proves_slots_lies_behind_them_and_differs() -> None:
    assert proof_at() + proof_of(b"a").nbytes == block_bytes()
    assert (proof_of(b"a") != proof_of(b"b")).any()


def test_transfers_take_turns() -> None:
    slots = Slots(Export(0, 0, b""))
    first, second, third = object(), object(), object()
    assert slots.is_turn_of(first)
    assert not slots.is_turn_of(second)
    assert not slots.is_turn_of(third)
    slots.leave(second)
    slots.leave(first)
    assert slots.is_turn_of(third)
    assert not slots.is_turn_of(first)
