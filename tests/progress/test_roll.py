"""The words by which ranks of a node compare their collectives, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from mpdist.errors import CollectiveMismatch
from mpdist.progress import roll
from mpdist.progress.roll import Recurring, Roll, Signer, roll_bytes


@dataclass
class Channel:
    """What a Signer needs of one."""

    rank: int
    world_ranks: tuple[int, ...]
    name: str = "world"

    def where(self) -> str:
        return f"'{self.name}' (rank {self.rank} of {len(self.world_ranks)})"


def signers(size: int, name: str = "world", memory: bytearray | None = None) -> list[Signer]:
    """Of the ranks of one node, each with a view of its own on one memory."""
    memory = bytearray(roll_bytes(size)) if memory is None else memory
    places = {rank: rank for rank in range(size)}
    made = [Roll(memory, places).signer(Channel(rank, tuple(range(size)), name)) for rank in range(size)]  # type: ignore[arg-type]  # what it needs of one
    return [each for each in made if each is not None]


def sign(signer: Signer, sequence: int, text: str, is_unchecked: bool = True) -> None:
    signer.sign(sequence, ("all_reduce", (str, text), is_unchecked))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("differs", [0, 1])
@pytest.mark.parametrize("comes_last", [False, True])
def test_wherever_one_differs_somebody_hears_of_it(size: int, differs: int, comes_last: bool) -> None:
    ranks = signers(size)
    order = sorted(range(size), key=lambda rank: (rank == differs) == comes_last)
    heard: dict[int, CollectiveMismatch] = {}
    for rank in order:
        try:
            sign(ranks[rank], 5, "x 3" if rank == differs else "x 2")
        except CollectiveMismatch as error:
            heard[rank] = error
    assert heard
    assert (list(heard) == [differs]) == comes_last
    for rank, error in heard.items():
        assert set(error.calls.values()) == {"all_reduce x 2", "all_reduce x 3"}
        assert error.calls[rank] == f"all_reduce x {3 if rank == differs else 2}"


def test_what_agrees_goes_on_for_ever() -> None:
    """Entries are used again and again; ranks run ahead, farther than is remembered."""
    first, second, third = signers(3)
    for sequence in range(1, 1200):
        sign(first, sequence, f"x {sequence % 300}")
    for sequence in range(1, 1200):
        sign(second, sequence, f"x {sequence % 300}")
        sign(third, sequence, f"x {sequence % 300}")


def test_communicators_do_not_take_each_others_entries() -> None:
    memory = bytearray(roll_bytes(2))
    of = {name: signers(2, name, memory) for name in ("world", "world/dup1", "world/dup2", "world/split3:0")}
    for sequence in range(1, 700):
        for number, (name, ranks) in enumerate(of.items()):
            sign(ranks[(sequence + number) % 2], sequence, f"{name} x {sequence}")
    for name, ranks in of.items():
        for rank in ranks:
            sign(rank, 700, f"{name} x 700")


def test_other_algorithms_compare_by_themselves() -> None:
    first, second = signers(2)
    sign(first, 1, "x 2", is_unchecked=False)
    sign(second, 1, "x 3", is_unchecked=False)
    sign(first, 2, "x 2", is_unchecked=False)
    sign(second, 2, "x 2")  # it takes another way, with the same call
    sign(first, 3, "x 2", is_unchecked=False)
    with pytest.raises(CollectiveMismatch, match="this rank calls all_reduce x 3, rank 0 has called all_reduce x 2"):
        sign(second, 3, "x 3")


def test_a_corrected_call_pairs_up() -> None:
    first, second = signers(2)
    sign(first, 1, "x 2")
    with pytest.raises(CollectiveMismatch):
        sign(second, 1, "x 3")
    sign(second, 1, "x 2")
    sign(first, 2, "x 2")


def test_refused_calls_are_not_in_the_way() -> None:
    """Who corrects its call first does not meet the wrong ones of others."""
    first, *others = signers(3)
    sign(first, 1, "x 2")
    for rank in others:
        with pytest.raises(CollectiveMismatch, match="rank 0 has called all_reduce x 2"):
            sign(rank, 1, "x 3")
    for rank in others:
        sign(rank, 1, "x 2")


def test_texts_that_lie_at_one_place_are_told_right() -> None:
    """Each is written again when its call comes again."""
    first, second = signers(2)
    texts = [f"x {number}" for number in range(700)]
    for sequence, text in enumerate([*texts, *texts[:200]], 1):
        sign(first, sequence, text)
        with pytest.raises(CollectiveMismatch, match=f"rank 0 has called all_reduce {text}[.]"):
            sign(second, sequence, "another")


def test_long_texts_differ_by_their_end() -> None:
    first, second = signers(2)
    sign(first, 1, "x" * 500 + "a")
    with pytest.raises(CollectiveMismatch, match=r"all_reduce x+\.\.\. \([0-9a-f]{8}\), rank 0"):
        sign(second, 1, "x" * 500 + "b")


def test_a_text_that_another_one_was_written_over_is_not_told() -> None:
    first, second = signers(2)
    sign(first, 1, "x 2")
    for number in range(4000):
        sign(first, 2 + number, f"y {number}")
    for number in range(4000 - 200, 4000):
        with pytest.raises(CollectiveMismatch, match=f"rank 0 has called (something else|all_reduce y {number})\\."):
            sign(second, 2 + number, "z")


@pytest.mark.parametrize(
    "details",
    [lambda: "x 2", partial("{} {}".format, "x", 2), partial("x {}".format, 2)],
    ids=["function", "arguments", "argument"],
)
def test_only_the_text_counts(details: Callable[[], str]) -> None:
    first, second = signers(2)
    sign(first, 1, "x 2")
    second.sign_made(1, "all_reduce", details, True)


def test_colors_and_addresses_may_differ() -> None:
    first, second = signers(2)
    first.sign_made(1, "split", lambda: "color 1", True)
    second.sign_made(1, "split", lambda: "color 2", True)
    sign(first, 2, "<function add at 0x7f00>")
    sign(second, 2, "<function add at 0x7f11>")


def test_who_is_alone_on_its_node_has_nothing_to_compare() -> None:
    roll = Roll(bytearray(roll_bytes(2)), {4: 0, 5: 1})
    assert roll.signer(Channel(1, (0, 4, 7))) is None  # type: ignore[arg-type]  # as above
    together = roll.signer(Channel(2, (0, 4, 5, 7)))  # type: ignore[arg-type]  # as above
    apart = roll.signer(Channel(1, (0, 4, 5, 7)))  # type: ignore[arg-type]  # as above
    assert together is not None
    assert apart is not None
    sign(together, 1, "x 2")
    with pytest.raises(CollectiveMismatch, match="rank 2 has called"):
        sign(apart, 1, "x 3")


def test_a_recurring_call_has_the_text_of_its_equal() -> None:
    """Each is known by itself: none makes the other write its text again."""
    first, second = signers(2)
    call = ("all_reduce", (str, "x 2"), True)
    recurring = Recurring(call)
    for number in range(4):
        first.sign(number, recurring if number % 2 else call)
        second.sign(number, call)
    assert first._codes[recurring] == first._codes[call] == second._codes[call]
    sign(first, 4, "x 3")
    with pytest.raises(CollectiveMismatch, match="this rank calls all_reduce x 2, rank 0 has called all_reduce x 3"):
        second.sign(4, Recurring(call))


def test_codes_whose_text_was_written_over_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "_TEXTS", 1)
    (first, _) = signers(2)
    calls = [Recurring(("all_reduce", (str, "x 2"), True)) for _ in range(3)]
    for number, call in enumerate(calls):
        first.sign(number, call)
    assert all(call in first._codes for call in calls)
    sign(first, 5, "x 3")
    assert not any(call in first._codes for call in calls)
