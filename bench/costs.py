"""Costs: how long an all_reduce takes by each algorithm, from a few constants. Pure.

The alpha-beta-gamma model (Hockney's cost of a message, and a cost of adding): a
message of n bytes takes alpha + beta n, adding n bytes gamma n, and, in shared
memory, copying n bytes mu n, meeting the other ranks sigma. The formulas are
those of Thakur, Rabenseifner, Gropp (2005), with nodes: messages between ranks of
one node cost other constants than those over the link, which all ranks of a node
share. Ranks are placed node by node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpdist.algorithms.crossing import SLICE_BYTES


@dataclass(frozen=True)
class Line:
    """A time that grows with the size: alpha + beta n.

    Attributes:
        alpha: seconds.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def time(self, nbytes: float, flows: float = 1) -> float:
        """Of one message, while so many flows share the way."""
        return self.alpha + self.beta * flows * nbytes


@dataclass(frozen=True)
class Machine:
    """The constants of one kind of node, and of the link between them.

    Attributes:
        message: between two ranks of a node, one way at a time.
        link: between two nodes.
        gamma: seconds to add a byte.
        shared: of an operation through shared memory: alpha is sigma, meeting the others; beta is mu, copying.
        cores: of a node.
    """

    message: Line
    link: Line
    gamma: float
    shared: Line
    cores: int


@dataclass(frozen=True)
class Layout:
    """`nodes` nodes with `local` ranks each."""

    nodes: int
    local: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.local


def crowd(layout: Layout, machine: Machine) -> float:
    """How many ranks share a core: whatever a core does takes so much longer."""
    return max(1.0, layout.local / machine.cores)


def _exchange(distance: int, nbytes: float, layout: Layout, machine: Machine) -> float:
    """All ranks send to, and receive from, the rank at a distance: over the link if that is on another node."""
    if distance >= layout.local and layout.nodes > 1:
        return machine.link.time(nbytes, layout.local)
    return _inside(nbytes, layout, machine)


def _inside(nbytes: float, layout: Layout, machine: Machine) -> float:
    """The same within a node: its core copies what a rank sends, and what it receives."""
    return 2 * machine.message.time(nbytes) * crowd(layout, machine)


def _adding(nbytes: float, layout: Layout, machine: Machine) -> float:
    return machine.gamma * nbytes * crowd(layout, machine)


def ring(nbytes: float, layout: Layout, machine: Machine) -> float:
    """2 (p - 1) steps of n / p bytes; each node sends one of its ranks' over the link."""
    p = layout.ranks
    if p == 1:
        return 0.0
    inside = _inside(nbytes / p, layout, machine) if layout.local > 1 else 0.0
    over = machine.link.time(nbytes / p) if layout.nodes > 1 else 0.0
    return 2 * (p - 1) * max(inside, over) + (p - 1) * _adding(nbytes / p, layout, machine)


def recursive_doubling(nbytes: float, layout: Layout, machine: Machine) -> float:
    """log2 p steps of n bytes; two more where p is no power of two."""
    steps = int(math.log2(layout.ranks))
    total = sum(_exchange(2**i, nbytes, layout, machine) + _adding(nbytes, layout, machine) for i in range(steps))
    return total + _odd_ranks(nbytes, layout, machine)


def halving_doubling(nbytes: float, layout: Layout, machine: Machine) -> float:
    """Reduce-scatter by halving, all-gather by doubling: the far ranks exchange the small pieces."""
    total = 0.0
    for i in range(int(math.log2(layout.ranks))):
        piece = nbytes / 2 ** (i + 1)
        total += 2 * _exchange(2**i, piece, layout, machine) + _adding(piece, layout, machine)
    return total + _odd_ranks(nbytes, layout, machine)


def _odd_ranks(nbytes: float, layout: Layout, machine: Machine) -> float:
    """Ranks beyond the largest power of two give their input to a neighbour, and get the result from it."""
    if layout.ranks & (layout.ranks - 1) == 0:
        return 0.0
    return 2 * _exchange(1, nbytes, layout, machine) + _adding(nbytes, layout, machine)


def shared_memory(nbytes: float, layout: Layout, machine: Machine, *, copies: float = 0) -> float:
    """Each rank adds its slice of all inputs, then takes the others' slices; on one node.

    Args:
        copies: of the whole array, besides: 0 for `comm.empty`.
    """
    moved = (layout.local - 1) / layout.local * nbytes
    work = _adding(moved, layout, machine) + machine.shared.beta * (moved + copies * nbytes) * crowd(layout, machine)
    return machine.shared.alpha * crowd(layout, machine) + work


def private_memory(nbytes: float, layout: Layout, machine: Machine) -> float:
    """The same with arrays that the other ranks can't see: what is added is copied before, and the result after."""
    return shared_memory(nbytes, layout, machine, copies=2 * (layout.local - 1) / layout.local)


def hierarchical(nbytes: float, layout: Layout, machine: Machine) -> float:
    """Reduce-scatter in the node, one rail for each local rank between nodes, all-gather in the node.

    A pipeline, slice by slice: while one is on the link, the next is reduced.
    """
    slices = max(1, math.ceil(nbytes / (layout.local * SLICE_BYTES)))
    inside = shared_memory(nbytes, Layout(1, layout.local), machine, copies=1) / slices
    rail = Layout(layout.nodes, 1)
    crowded = Machine(
        machine.message, Line(machine.link.alpha, machine.link.beta * layout.local), machine.gamma, machine.shared, 1
    )
    over = min(flat(nbytes / layout.local / slices, rail, crowded) for flat in FLAT.values())
    return inside + over + (slices - 1) * max(inside, over)


Cost = Callable[[float, Layout, Machine], float]
FLAT: dict[str, Cost] = {
    "ring": ring,
    "recursive doubling": recursive_doubling,
    "reduce-scatter + all-gather": halving_doubling,
}


def algorithms(layout: Layout) -> dict[str, Cost]:
    """What can be used here."""
    if layout.nodes == 1:
        return {**FLAT, "shared memory": private_memory}
    return {**FLAT, "hierarchical": hierarchical}


def best(nbytes: float, layout: Layout, machine: Machine, among: Mapping[str, Cost]) -> tuple[str, float]:
    """Name and seconds of the fastest."""
    times = {name: cost(nbytes, layout, machine) for name, cost in among.items()}
    name = min(times, key=times.__getitem__)
    return name, times[name]


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Constants >= 0 whose sum of columns comes closest to the measured times, by relative error.

    Args:
        columns: one for each constant: what it is multiplied by, at each measurement.
    """
    scaled = np.array(columns, dtype=float) / np.array(seconds, dtype=float)
    chosen = np.zeros(len(columns))
    smallest = math.inf
    for number in range(1, len(columns) + 1):
        for subset in itertools.combinations(range(len(columns)), number):  # a negative one must be left out
            part = scaled[list(subset)].T
            solution, *_ = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)
            error = float(np.sum((part @ solution - 1) ** 2))
            if (solution >= 0).all() and error < smallest:
                smallest, chosen = error, np.zeros(len(columns))
                chosen[list(subset)] = solution
    return [float(value) for value in chosen]


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """alpha and beta from the times of messages."""
    alpha, beta = fit([[1.0] * len(sizes), list(sizes)], seconds)
    return Line(alpha, beta)


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The same of a link that lets a burst pass faster: alpha of the smallest message, beta of the largest two."""
    (least, alpha), *_, (size, before), (most, last) = sorted(zip(sizes, seconds, strict=True))
    return Line(alpha, max(last - before, 0.0) / (most - size)) if least < size else fit_line(sizes, seconds)


def median_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median([abs(predicted / measured - 1) for predicted, measured in pairs]))


def efficiency(step: float, communication: float, hidden: float = 0.0) -> float:
    """Part of the time that goes into computing.

    Args:
        step: seconds that one step computes.
        hidden: part of the step behind which communication can hide: 0 for none.
    """
    return step / (step + max(0.0, communication - hidden * step))
