"""Random programs: what a program is (pure data, the same on all ranks), and what it must give.

A program is a list of steps that all ranks take in the same order. Which arrays
and objects a step moves, and what comes out on each rank, follows from the step
and the rank alone: `expected` computes it in one process. How a rank waits for
its steps is decided while it runs, see `execution`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]

SIZES = (0, 1, 2, 7, 255, 256, 257, 3000, 20_000)
# Beyond the sizes from which on collectives take other algorithms, and beyond what these show at a time.
LARGE_SIZES = (9000, 40_000, 270_001)
LARGE_CHANCE = 0.15
TYPES = ("uint8", "int32", "float64", "complex64")

MESSAGES = ("array", "object", "any source", "probe", "sendrecv", "interrupted", "late")
COLLECTIVES = (
    "barrier", "broadcast", "all_reduce", "deterministic", "avg", "half", "function", "reduce", "scan", "exscan",
    "reduce_scatter", "gather", "all_gather", "scatter", "all_to_all", "uneven gather", "uneven all_gather",
    "uneven scatter", "uneven all_to_all", "broadcast_object", "gather_object", "all_gather_object", "scatter_object",
    "all_to_all_object",
)  # fmt: skip
GROUPS = ("dup", "split", "subgroup")

# Tags of ordinary messages: few, so that order matters. Steps that need a tag of their own take theirs from here on.
TAGS = 3
OWN_TAGS = 100


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        number: its position in the program, from which its data are made.
        kind: one of MESSAGES, COLLECTIVES or GROUPS; "cancel": a receive that no message meets.
        comm: which communicator: 0 is the first, each step of GROUPS adds one.
        parts: its members as ranks of the first, a tuple for each part that it is split into.
        src, dst: ranks of the first communicator; both in one part.
        root: place in each part, modulo its size.
        is_resident: bit r: arrays of rank r lie in memory that its node reads.
    """

    number: int
    kind: str
    comm: int
    parts: tuple[tuple[int, ...], ...]
    size: int
    dtype: str
    tag: int
    src: int
    dst: int
    root: int
    is_into: bool
    is_resident: int

    def part_of(self, rank: int) -> tuple[int, ...] | None:
        """The members of the communicator that this rank uses; None if it is in none."""
        return next((part for part in self.parts if rank in part), None)


def program(seed: int, ranks: int, length: int) -> list[Step]:
    """A random program for so many ranks."""
    chance = random.Random(f"{seed} {ranks}")
    comms: list[tuple[tuple[int, ...], ...]] = [(tuple(range(ranks)),)]
    steps: list[Step] = []
    for number in range(length):
        kind = _kind(chance, len(comms))
        comm = chance.randrange(len(comms))
        parts = comms[comm]
        part = chance.choice(parts)
        is_large = kind in COLLECTIVES and chance.random() < LARGE_CHANCE
        steps.append(
            Step(
                number, kind, comm, parts, chance.choice(LARGE_SIZES if is_large else SIZES), chance.choice(TYPES),
                _tag(chance, kind, number), chance.choice(part), chance.choice(part), chance.randrange(ranks),
                chance.random() < 0.5, chance.choice((0, 0, 2**ranks - 1, chance.randrange(2**ranks))),
            )
        )  # fmt: skip
        if kind in GROUPS:
            comms.append(children(steps[-1]))
    return steps


def _kind(chance: random.Random, comms: int) -> str:
    group = 0.06 if comms < 6 else 0.0
    kinds = chance.choices((MESSAGES, COLLECTIVES, GROUPS, ("cancel",)), (0.5, 0.38, group, 0.06))[0]
    return chance.choice(kinds)


def _tag(chance: random.Random, kind: str, number: int) -> int:
    return chance.randrange(TAGS) if kind in ("array", "object", "sendrecv") else OWN_TAGS + number


def children(step: Step) -> tuple[tuple[int, ...], ...]:
    """The parts of the communicator that a step of GROUPS makes."""
    if step.kind == "dup":
        return step.parts
    if step.kind == "subgroup":
        return tuple(tuple(reversed(part)) for part in step.parts)
    halves = [
        [part[place] for place in range(len(part)) if place % 2 == color] for part in step.parts for color in (0, 1)
    ]
    return tuple(tuple(sorted(half, key=lambda rank: split_key(step, rank))) for half in halves if half)


def split_key(step: Step, rank: int) -> int:
    return (rank * 7 + step.number) % 5 * 100 + rank


# ---------------------------------------------------------------------- data


def values(step: Step, rank: int, count: int, salt: int = 0) -> Values:
    """What a rank gives: small whole numbers, exact under every operation that is used."""
    generator = np.random.default_rng([step.number, rank, salt])
    return generator.integers(0, 4, count).astype("float16" if step.kind == "half" else step.dtype)


def item(step: Step, rank: int, salt: int = 0) -> Any:
    """What a rank gives as an object."""
    return (step.number, rank, salt, values(step, rank, step.size), "x" * (rank + salt))


def block_size(step: Step, src: int, dst: int) -> int:
    """Elements of an uneven block."""
    return (step.size + 5 * src + 3 * dst) % 50


def fold(a: Values, b: Values) -> Values:
    """An operation of two arrays that is associative, but not commutative: the later one, unless it is zero."""
    return np.where(b == 0, a, b).astype(a.dtype)


def expected(step: Step, rank: int) -> Any:
    """The result of a collective on this rank."""
    part = step.part_of(rank)
    assert part is not None
    place, size = part.index(rank), len(part)
    root = part[step.root % size]
    mine = slice(place * step.size, (place + 1) * step.size)
    at_root = rank == root

    def inputs(blocks: int = 1) -> list[Values]:
        return [values(step, member, step.size * blocks) for member in part]

    def uneven(dst: int) -> list[Values]:
        return [values(step, member, block_size(step, member, dst), dst) for member in part]

    match step.kind:
        case "barrier":
            return None
        case "broadcast":
            return values(step, root, step.size)
        case "all_reduce" | "half" | "deterministic":
            return _sum(inputs())
        case "avg":
            return _sum([each.real.astype(np.float64) for each in inputs()]) / size
        case "function":
            return _folded(inputs())
        case "reduce":
            return np.maximum.reduce(_real(inputs())) if at_root else None
        case "scan":
            return _sum(inputs()[: place + 1])
        case "exscan":
            return _sum(inputs()[:place]) if place else None
        case "reduce_scatter":
            return _sum(inputs(size))[mine]
        case "gather":
            return inputs() if at_root else None
        case "all_gather":
            return inputs()
        case "scatter":
            return values(step, root, step.size * size)[mine]
        case "all_to_all":
            return [each[mine] for each in inputs(size)]
        case "uneven gather":
            return uneven(root) if at_root else None
        case "uneven all_gather":
            return uneven(0)
        case "uneven scatter":
            return values(step, root, block_size(step, root, rank), rank)
        case "uneven all_to_all":
            return uneven(rank)
        case "broadcast_object":
            return item(step, root)
        case "gather_object":
            return [item(step, member) for member in part] if at_root else None
        case "all_gather_object":
            return [item(step, member) for member in part]
        case "scatter_object":
            return item(step, root, rank)
        case "all_to_all_object":
            return [item(step, member, rank) for member in part]
    raise AssertionError(step.kind)


def _sum(arrays: Sequence[Values]) -> Values:
    return np.add.reduce(np.stack(arrays), dtype=arrays[0].dtype)


def _real(arrays: Sequence[Values]) -> list[Values]:
    return [each.real for each in arrays]


def _folded(arrays: Sequence[Values]) -> Values:
    total = arrays[0]
    for each in arrays[1:]:
        total = fold(total, each)
    return total
