"""Slots: memory of a device that others may open, through which what they cannot reach is passed on.

Two of them, so that one is filled while the other is emptied; and one transfer at a
time: whoever waits for its turn waits for a receiver that is taking its message.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpdist.memory.elements import Array
    from mpdist.memory.sharing import Export

# Queueing a copy and telling of it takes some 50 us; copying so much within a GPU about as long.
SLOT_BYTES = 32 * 1024 * 1024
SLOTS = 2

# What lies behind the slots: whoever opens them finds it there, or has opened something else.
PROOF_BYTES = 2048


def block_bytes() -> int:
    """Size of all of it."""
    return SLOTS * SLOT_BYTES + PROOF_BYTES


def proof_at() -> int:
    """Offset of the proof."""
    return SLOTS * SLOT_BYTES


def proof_of(handle: bytes) -> Array:
    """What lies behind the slots that are opened by this handle (uint8)."""
    return np.frombuffer(blake2b(handle).digest() * (PROOF_BYTES // 64), np.uint8)


def spans(nbytes: int) -> list[tuple[int, int, int]]:
    """Offset in the slots, then start and end in the array, of each part in which it travels."""
    starts = range(0, nbytes, SLOT_BYTES)
    return [
        (number % SLOTS * SLOT_BYTES, start, min(start + SLOT_BYTES, nbytes)) for number, start in enumerate(starts)
    ]


class Slots:
    """Those of this process on one device.

    Attributes:
        block: where they are.
    """

    def __init__(self, block: Export) -> None:
        self.block = block
        self._queue: deque[object] = deque()

    def is_turn_of(self, transfer: object) -> bool:
        """Whether a transfer may use them; it stands in line from the first time on."""
        if transfer not in self._queue:
            self._queue.append(transfer)
        return self._queue[0] is transfer

    def leave(self, transfer: object) -> None:
        """A transfer is over, or needs them no more."""
        if transfer in self._queue:
            self._queue.remove(transfer)
