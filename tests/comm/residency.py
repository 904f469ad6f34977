"""Residency: where the arrays of a collective lie, as seen by the ranks that share memory.

The same values in private memory, in `comm.empty` memory, or in a part of it; on
all ranks alike or not. Around parts lie guards, which nothing may touch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from comm.arrays import Values, plain

from mpdist import Communicator

GUARDS = 3
GUARD = 1

PRIVATE, RESIDENT, PRIVATE_PART, RESIDENT_PART = range(4)

# Name -> what the input and the output of a rank are, by its number modulo the length.
RESIDENCIES: dict[str, tuple[tuple[int, int], ...]] = {
    "private": ((PRIVATE, PRIVATE_PART),),
    "resident": ((RESIDENT, RESIDENT),),
    "inside": ((RESIDENT_PART, RESIDENT_PART),),
    "into resident": ((PRIVATE_PART, RESIDENT_PART),),
    "from resident": ((RESIDENT, PRIVATE_PART),),
    "mixed": ((RESIDENT_PART, RESIDENT), (PRIVATE, PRIVATE_PART)),
    "crossed": ((RESIDENT, PRIVATE_PART), (PRIVATE, RESIDENT_PART), (RESIDENT_PART, RESIDENT_PART)),
}


class Placed:
    """An array somewhere, and its guards.

    Attributes:
        array: what a collective gets.
    """

    def __init__(self, comm: Communicator, kind: int, values: Values, dtype: str) -> None:
        storage = np.dtype(plain(dtype))
        guards = GUARDS if kind in (PRIVATE_PART, RESIDENT_PART) else 0
        count = values.size + 2 * guards
        make = comm.empty if kind in (RESIDENT, RESIDENT_PART) else np.empty
        self.array: Any
        self._whole: Any = make(count, storage)
        self._whole[:guards] = self._whole[count - guards :] = GUARD
        self._guards = guards
        self.array = self._whole[guards : count - guards]
        self.array[:] = values

    def check_guards(self, case: object) -> None:
        around = np.concatenate([self._whole[: self._guards], self._whole[self._whole.size - self._guards :]])
        assert (around == GUARD).all(), f"written outside the array in case {case}"


def place(comm: Communicator, residency: str, what: int, values: Values, dtype: str) -> Placed:
    """The input (what = 0) or the output (1) of this rank."""
    kinds = RESIDENCIES[residency]
    return Placed(comm, kinds[comm.rank % len(kinds)][what], values, dtype)
