"""Calls: what each member tells of its collective in one word, and why the calls of several do not go together.

A word holds how many elements of which type must be there on all, what reduces
them, the operation, its first round, whether that is its only one, which members
can end together whatever they have called, and whether it is done as a request. A
word that was told before has another round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from mpdist.errors import CollectiveMismatch, MpdistError, SizeMismatch
from mpdist.memory.elements import BY_CODE
from mpdist.memory.ops import NAMES_BY_CODE

if TYPE_CHECKING:
    from mpdist.memory import Element, ReduceOp

# Two members reduce 16-bit numbers in another way, see `either`.
OF_HALVES = "all_reduce of 16-bit numbers"
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_gather", "all_to_all"),
    OF_HALVES,
)


def all_reduce_of(element: Element) -> str:
    """Its operation."""
    return OF_HALVES if element.is_half else "all_reduce"


# Of 63 bits: round, operation, its two properties, what reduces, type, number of elements. Of numbers of rounds and
# elements that need more the last ones are told.
_ROUND_BITS, _OPERATION_BITS, _REDUCES_BITS, _TYPE_BITS, _COUNT_BITS = 14, 4, 4, 5, 34
ROUND_MASK = (1 << _ROUND_BITS) - 1
_OPERATION_MASK = (1 << _OPERATION_BITS) - 1
_IS_ONE_ROUND = 1 << _ROUND_BITS + _OPERATION_BITS
_IS_REQUEST = _IS_ONE_ROUND << 1
_KIND_AT = _ROUND_BITS + _OPERATION_BITS + 2
_COUNT_AT = _KIND_AT + _REDUCES_BITS + _TYPE_BITS
_KIND_MASK = (1 << _REDUCES_BITS + _TYPE_BITS) - 1
_COUNT_MASK = (1 << _COUNT_BITS) - 1


def kind_of(element: Element, op: ReduceOp | None = None) -> int:
    """The type of the elements, and what reduces them, as a number."""
    return element.code << _REDUCES_BITS | (0 if op is None else op.code)


def call_word(op: str, nbytes: int, kind: int, number: int, is_one_round: bool, is_request: bool = False) -> int:
    """A call as a word; `number`: of its first round."""
    count = nbytes // _element(kind).itemsize & _COUNT_MASK
    word = count << _COUNT_AT | kind << _KIND_AT | OPERATIONS.index(op) << _ROUND_BITS | number & ROUND_MASK
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
        kinds = {rank: _kind_text(call >> _KIND_AT & _KIND_MASK) for rank, call in calls.items()}
        text = f"{_operation(mine)} on {where}: the ranks' ops or element types differ ({listed(kinds)})"
        return CollectiveMismatch(f"{text}; give all the same", kinds)
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
    return (call >> _COUNT_AT) * _element(call >> _KIND_AT & _KIND_MASK).itemsize


def _element(kind: int) -> Element:
    return BY_CODE[kind >> _REDUCES_BITS]


def _kind_text(kind: int) -> str:
    """`max of float32`."""
    op = kind & (1 << _REDUCES_BITS) - 1
    return f"{NAMES_BY_CODE[op]} of {_element(kind).name}" if op else _element(kind).name
