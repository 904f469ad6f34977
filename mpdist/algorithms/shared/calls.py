"""Calls: what each member tells of its collective in one word, and why the calls of several do not go together.

A word holds the bytes that must be the same on all, the operation, its first
round, whether that is its only one, which members can end together whatever they
have called, and whether it is done as a request: the same sizes of other ops or
element types may not be. A word that was told before has another round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from mpdist.errors import CollectiveMismatch, MpdistError, SizeMismatch

if TYPE_CHECKING:
    from mpdist.memory import Element

# Two members reduce 16-bit numbers in another way, see `either`.
OF_HALVES = "all_reduce of 16-bit numbers"
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_gather", "all_to_all"),
    OF_HALVES,
)


def all_reduce_of(element: Element) -> str:
    """Its operation."""
    return OF_HALVES if element.is_half else "all_reduce"


_ROUND_BITS, _OPERATION_BITS = 16, 4
ROUND_MASK = (1 << _ROUND_BITS) - 1
_OPERATION_MASK = (1 << _OPERATION_BITS) - 1
_IS_ONE_ROUND = 1 << _ROUND_BITS + _OPERATION_BITS
_IS_REQUEST = _IS_ONE_ROUND << 1
_NBYTES_AT = _ROUND_BITS + _OPERATION_BITS + 2


def call_word(op: str, nbytes: int, number: int, is_one_round: bool, is_request: bool = False) -> int:
    """A call as a word; `number`: of its first round."""
    word = nbytes << _NBYTES_AT | OPERATIONS.index(op) << _ROUND_BITS | number & ROUND_MASK
    return word | _IS_ONE_ROUND * is_one_round | _IS_REQUEST * is_request


def are_in_step(calls: Collection[int]) -> bool:
    """Whether all have one round, and that the same."""
    return all(call & _IS_ONE_ROUND for call in calls) and begin_alike(calls)


def begin_alike(calls: Collection[int]) -> bool:
    """Whether their first round is the same."""
    return len({call & ROUND_MASK for call in calls}) == 1


def misfit(where: str, calls: Mapping[int, int], mine: int) -> MpdistError | None:
    """Why calls do not go together, on the member whose own is `mine`; None if they do.

    Args:
        where: the communicator.
        calls: rank -> what it tells.
    """
    if len(set(calls.values())) < 2:
        return None
    ops = {rank: _operation(call) for rank, call in calls.items()}
    if begin_alike(calls.values()) and len(set(ops.values())) > 1:
        text = f"collectives on {where} differ between ranks ({listed(ops)}); all must call the same ones in one order"
        return CollectiveMismatch(text, ops)
    if begin_alike(calls.values()) and len({_nbytes(call) for call in calls.values()}) == 1:
        return CollectiveMismatch(
            f"{_operation(mine)} on {where}: the ranks' ops or element types differ; give all the same", ops
        )
    sizes = {
        rank: "another operation, or fewer" if (call ^ mine) & ROUND_MASK else str(_nbytes(call))
        for rank, call in calls.items()
    }
    return SizeMismatch(
        f"{_operation(mine)} on {where}: the ranks' arrays differ in bytes ({listed(sizes)}); "
        "give all the same number of elements"
    )


def other_roots(op: str, where: str) -> CollectiveMismatch:
    """The members have taken different roots."""
    return CollectiveMismatch(f"{op} on {where}: the ranks differ in src or dst; give all the same")


def listed(words: Mapping[int, str]) -> str:
    """`rank 0: this, rank 2: that`."""
    return ", ".join(f"rank {rank}: {each}" for rank, each in sorted(words.items()))


def _operation(call: int) -> str:
    return OPERATIONS[call >> _ROUND_BITS & _OPERATION_MASK]


def _nbytes(call: int) -> int:
    return call >> _NBYTES_AT
