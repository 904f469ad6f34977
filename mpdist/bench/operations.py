"""Operations: what each moves, what each must give, and what its bandwidth means.

Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): the size is
the largest array of a rank, so the whole of all ranks' blocks for all_gather, reduce_scatter,
gather, scatter and all_to_all; algorithm bandwidth is size / time; bus bandwidth
scales it to what the busiest wire must carry, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
ITEM_BYTES = 4


def _once(ranks: int) -> float:
    return 1.0


def _without_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Operation:
    """One line of the table below.

    Attributes:
        bus: bus bandwidth / algorithm bandwidth, for a number of ranks.
        x, out: what its arrays hold: "whole", "block" or, where there is none, "".
        is_rooted: has a src or dst, which moves on by one rank each time, so that no rank runs ahead of the others.
    """

    name: str
    bus: Callable[[int], float]
    x: str = "whole"
    out: str = ""
    is_rooted: bool = False

    @property
    def has_size(self) -> bool:
        return self.x != ""

    def elements(self, nbytes: int, ranks: int) -> int:
        """float32 elements of the whole, a multiple of the ranks, at least one for each."""
        if not self.has_size:
            return 0
        if "block" not in (self.x, self.out) and self.name != "all_to_all":
            return max(nbytes // ITEM_BYTES, 1)
        return max(nbytes // ITEM_BYTES // ranks, 1) * ranks


PING_PONG = "ping_pong"
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", _there_and_back),
        Operation("reduce_scatter", _without_own, out="block"),
        Operation("all_gather", _without_own, x="block", out="whole"),
        Operation("broadcast", _once, is_rooted=True),
        Operation("all_to_all", _without_own, out="whole"),
        Operation("reduce", _once, out="whole", is_rooted=True),
        Operation("gather", _without_own, x="block", out="whole", is_rooted=True),
        Operation("scatter", _without_own, out="block", is_rooted=True),
        Operation(PING_PONG, _once, out="whole"),
        Operation("barrier", _once, x=""),
    )
}
# A ping-pong's time is half of there and back.
MESSAGES_EACH_TIME = {PING_PONG: 2}


def length(what: str, elements: int, ranks: int) -> int:
    """Elements of "whole" or "block"."""
    return {"whole": elements, "block": elements // ranks, "": 0}[what]


def given(rank: int, count: int) -> Array:
    """The input of a rank, different at each place and rank; small whole numbers, so sums are exact in any order."""
    pattern = np.arange(13, dtype=np.float32) + 16 * (rank + 1)
    return np.tile(pattern, count // len(pattern) + 1)[:count]


def expected(op: Operation, rank: int, ranks: int, elements: int) -> Array | None:
    """The result on this rank, root 0, of all ranks' `given` inputs; None if it gets none."""
    block = elements // ranks
    mine = slice(rank * block, (rank + 1) * block)
    match op.name:
        case "all_reduce":
            return _sum(ranks, elements)
        case "reduce":
            return _sum(ranks, elements) if rank == 0 else None
        case "reduce_scatter":
            return _sum(ranks, elements)[mine]
        case "broadcast":
            return given(0, elements)
        case "scatter":
            return given(0, elements)[mine]
        case "all_gather":
            return np.concatenate([given(other, block) for other in range(ranks)])
        case "gather":
            return np.concatenate([given(other, block) for other in range(ranks)]) if rank == 0 else None
        case "all_to_all":
            return np.concatenate([given(other, elements)[mine] for other in range(ranks)])
        case "ping_pong":
            other = partner(rank, ranks)
            return None if other is None else given(other, elements)
    return None


def _sum(ranks: int, elements: int) -> Array:
    total = given(0, elements)
    for rank in range(1, ranks):
        total += given(rank, elements)
    return total


def partner(rank: int, ranks: int) -> int | None:
    """With whom a rank plays ping-pong: 0 with 1, 2 with 3; the last of an odd number with nobody."""
    other = rank ^ 1
    return other if other < ranks else None
