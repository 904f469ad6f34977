"""Forcing: communicators on which an algorithm is forced, also several nodes on one, without another launch.

A communicator takes its algorithms from the Engine's thresholds when it is made,
and where its ranks are from the Engine's nodes. Every rank replaces both alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest

from mpdist import Communicator
from mpdist.algorithms.choose import Algorithm, Thresholds
from mpdist.algorithms.shared.pace import Pace


@dataclass(frozen=True)
class Way:
    """How collectives are done.

    Attributes:
        forced: the only algorithm; None: chosen by size.
        ranks_per_node: so many ranks are taken for a node; 0: as it is.
        has_reach: whether private memory of others is reached through the kernel, where it allows that; else slots.
        changes: a reduction of two members goes straight and through slots by turns, as if each were faster in turn.
    """

    forced: Algorithm | None
    ranks_per_node: int = 0
    has_reach: bool = True
    changes: bool = False

    def __str__(self) -> str:
        name = "chosen" if self.forced is None else self.forced.value
        name += "" if self.has_reach else "-slots"
        name += "-changing" if self.changes else ""
        return f"{name}-{self.ranks_per_node}" if self.ranks_per_node else name


NATIVE = Way(Algorithm.NATIVE)
SHARED = Way(Algorithm.SHARED)
SLOTS = Way(Algorithm.SHARED, has_reach=False)
CHANGING = Way(Algorithm.SHARED, changes=True)
CHOSEN = Way(None)
PAIRS = Way(Algorithm.HIERARCHICAL, 2)
PAIRS_SLOTS = Way(Algorithm.HIERARCHICAL, 2, has_reach=False)
TRIPLES = Way(Algorithm.HIERARCHICAL, 3)
"""On 4 ranks: a node of three and one of one."""
ALONE = Way(Algorithm.HIERARCHICAL, 1)
"""One rank on each node."""
ALONE_CHOSEN = Way(None, 1)


def skip_without_reach(comm: Communicator) -> None:
    """Skip the test where private memory of others cannot be reached."""
    if comm._channel.engine.shared.reach is None:  # type: ignore[union-attr]  # ranks of one node share
        pytest.skip("the kernel keeps processes from each other's memory here")


@contextmanager
def replaced(comm: Communicator, way: Way) -> Iterator[None]:
    """What is made inside, on all ranks, goes this way."""
    engine = comm._channel.engine
    shared = engine.shared
    before = engine.thresholds, engine.nodes, None if shared is None else shared.reach
    if way.forced is not None:
        engine.thresholds = Thresholds(forced=way.forced)
    if way.ranks_per_node:
        engine.nodes = [rank // way.ranks_per_node * way.ranks_per_node for rank in range(len(engine.nodes))]
    if shared is not None and not way.has_reach:
        shared.reach = None
    by_pace = Pace.is_through_slots
    if way.changes:
        Pace.is_through_slots = _by_turns  # type: ignore[method-assign]  # on all ranks alike
    try:
        yield
    finally:
        Pace.is_through_slots = by_pace  # type: ignore[method-assign]  # as it was
        engine.thresholds, engine.nodes, reach = before
        if shared is not None:
            shared.reach = reach


def _by_turns(pace: Pace, _: int) -> bool:
    """Twice through slots, once not; asked once for each collective."""
    pace.calls = getattr(pace, "calls", -1) + 1  # type: ignore[attr-defined]  # of these tests
    return pace.calls % 3 < 2  # type: ignore[attr-defined, no-any-return]  # as above


@asynccontextmanager
async def forced(comm: Communicator, way: Way) -> AsyncIterator[Communicator]:
    """A duplicate of the communicator whose collectives go this way."""
    with replaced(comm, way):
        async with comm.dup() as made:
            yield made
