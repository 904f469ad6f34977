"""Plans of collectives over slots give the result in every order in which members may be done with their parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpdist.algorithms.devices import direct_plan, one_gpu_plan
from mpdist.algorithms.devices import plan as plans
from mpdist.algorithms.devices.order import Tell, Wait, order
from mpdist.algorithms.devices.plan import AllReduce, At, Fold, Plan, Where

POISON = 0xDEAD
ITEM = np.dtype(np.int64)


class Member:
    """Its memory, and how far it is. A part is done at once, in an order that the test chooses."""

    def __init__(self, node: list[Member], rank: int, x: np.ndarray, out: np.ndarray) -> None:
        self.node, self.rank, self.x, self.out = node, rank, x, out
        self.block = np.full(plans.block_bytes() // ITEM.itemsize, POISON, ITEM)
        self.told = [0, 0]

    def memory(self, at: At, number: int, count: int) -> np.ndarray:
        start = at.offset // ITEM.itemsize
        if at.where in (Where.X, Where.OUT):
            owner = self.node[at.member]
            memory = owner.x if at.where is Where.X else owner.out
        else:
            memory = self.node[at.member].block
            start += plans.place_in_block(at.where, number) // ITEM.itemsize
        part = memory[start : start + count]
        assert len(part) == count
        return part

    def do(self, piece: plans.Piece, number: int) -> None:
        if isinstance(piece, Fold):
            total = sum(self.memory(source, number, piece.length).copy() for source in piece.sources)
            for target in piece.targets:
                self.memory(target, number, piece.length)[:] = total
        else:
            count = piece.nbytes // ITEM.itemsize
            self.memory(piece.target, number, count)[:] = self.memory(piece.source, number, count)

    def run(self, plan: Plan, first: int) -> Iterator[Callable[[], bool]]:
        """Yields what it waits for."""
        for step in order(plan, first):
            if isinstance(step, Wait):
                yield partial(self._all_have, step)
            elif isinstance(step, Tell):
                self.told[step.told] += 1
                assert self.told[step.told] == step.rounds
            else:
                for piece in step.pieces:
                    yield lambda: True
                    self.do(piece, step.number)

    def _all_have(self, wait: Wait) -> bool:
        return all(each.told[wait.told] >= wait.rounds for each in self.node)


def finish(runs: list[Iterator[Callable[[], bool]]], chance: random.Random) -> None:
    """Let each go on where it can, in any order."""
    waits: list[Callable[[], bool] | None] = [next(run, None) for run in runs]
    while any(waits):
        ready = [index for index, wait in enumerate(waits) if wait is not None and wait()]
        assert ready, "all wait for each other"
        index = chance.choice(ready) if chance.random() < 0.7 else ready[0]
        waits[index] = next(runs[index], None)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SLOT_BYTES", 4096)  # 512 elements


COUNTS = (0, 1, 7, 512, 513, 3000)


class Whole(SimpleNamespace):
    AllReduce, ReduceScatter = one_gpu_plan.AllReduceOverSlots, plans.ReduceScatter
    AllGather, Broadcast = plans.AllGather, plans.Broadcast


@pytest.fixture(params=[plans, direct_plan, one_gpu_plan, Whole], ids=["slots", "direct", "led", "slots of one GPU"])
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


def cases(
    way: Any, size: int, count: int, values: list[np.ndarray]
) -> Iterator[tuple[str, list[Plan], list[np.ndarray]]]:
    """Name, the plans of all members, and what must be in their OUT, or for broadcast in their x."""
    nbytes, src = ITEM.itemsize, count % size
    rows = sum(values)[: count // size * size].reshape(size, -1)
    for name, make, elements, expected in (
        ("all_reduce", way.AllReduce, count, [sum(values)] * size),
        ("all_gather", way.AllGather, count, [np.concatenate(values)] * size),
        ("reduce_scatter", way.ReduceScatter, rows.size, list(rows)),
    ):
        yield name, [make(rank, size, elements, nbytes) for rank in range(size)], expected
    yield "broadcast", [way.Broadcast(rank, size, count, nbytes, src) for rank in range(size)], [values[src]] * size


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_one_after_the_other_in_any_order_of_members(way: Any, size: int, seed: int) -> None:
    chance = random.Random(100 * size + seed)
    node: list[Member] = []
    node += [Member(node, rank, np.empty(0, ITEM), np.empty(0, ITEM)) for rank in range(size)]
    runs: list[Iterator[Callable[[], bool]]] = []
    first = 0
    work: list[tuple[str, list[Plan], list[np.ndarray], list[np.ndarray]]] = []
    for count in chance.sample(COUNTS, 4):
        values = [np.arange(count, dtype=ITEM) * 7 + 1000 * rank + seed for rank in range(size)]
        for name, members, expected in cases(way, size, count, values):
            work.append((name, members, expected, values))
    chance.shuffle(work)
    results: list[tuple[str, int, np.ndarray, np.ndarray]] = []

    def all_of(member: Member) -> Iterator[Callable[[], bool]]:
        number = first
        for name, members, expected, values in work:
            plan = members[member.rank]
            member.x = values[member.rank][: plan.count].copy()
            out = np.full(len(expected[member.rank]), POISON, ITEM)
            member.out = member.x if name == "broadcast" or (name == "all_reduce" and number % 2) else out
            yield from member.run(plan, number)
            number += plan.rounds
            results.append((name, member.rank, member.out.copy(), expected[member.rank]))
            for array in (member.x, member.out):  # which belong to the program again
                array[:] = POISON

    runs = [all_of(member) for member in node]
    finish(runs, chance)
    assert len(results) == size * len(work)
    for name, rank, found, wanted in results:
        np.testing.assert_array_equal(found, wanted, err_msg=f"{name} on member {rank}")


def test_what_is_reduced_fits_its_place() -> None:
    for size in (2, 3, 7):
        for piece in AllReduce(0, size, 5000, 8).take(0):
            assert isinstance(piece, Fold)
            assert piece.length * 8 <= plans.SLOT_BYTES // 2
