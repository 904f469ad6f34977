"""Notes: what the ranks tell each other beside the gradients, in the tail of the last bucket, so without a message.

    one number per parameter    1 where this rank has a gradient: the sum says how many ranks have
    one number per rank         seconds that this rank computed, in its own place: who was the slowest
    one number                  1 where parameters were frozen or thawed, so that the gradients are in other messages
    one number                  forwards since the last average: a rank that has more may have skipped a backward

All are float32 or float64 numbers of a sum, exact as far as needed, and in the CPU's memory: NumPy reads and writes
them, whose calls take less than torch's.
"""

from __future__ import annotations

from torch import Tensor

# No seconds for each rank in larger jobs: the note would be longer than many buckets.
TIMED_RANKS = 1024


class Notes:
    """Room for the notes of one step."""

    def __init__(self, room: Tensor, count: int, rank: int, size: int) -> None:
        """Take `length(count, size)` elements of memory that will be summed over the ranks."""
        self._room = room.numpy()
        self._count = count
        self._rank = rank
        self._size = size

    @staticmethod
    def length(count: int, size: int) -> int:
        """Elements needed for so many parameters and ranks."""
        return count + (size if size <= TIMED_RANKS else 0) + 2

    def write(self, unused: list[int], seconds: float, forwards: int) -> None:
        """Before the sum: parameters without a gradient here, seconds of computing, forwards since the last average."""
        room = self._room
        room[: self._count] = 1.0
        room[self._count :] = 0.0
        if unused:
            room[unused] = 0.0
        if self._size <= TIMED_RANKS:
            room[self._count + self._rank] = seconds
        room[-1] = forwards

    def write_absent(self) -> None:
        """The note of a rank that has no inputs any more."""
        self._room[:] = 0.0

    def write_changed(self) -> None:
        """The note of a rank whose parameters were frozen or thawed."""
        self._room[:] = 0.0
        self._room[-2] = 1.0

    def used(self) -> list[int]:
        """After the sum: for each parameter, how many ranks have a gradient."""
        return [round(number) for number in self._room[: self._count].tolist()]

    def are_all_used(self, ranks: int) -> bool:
        """After the sum: whether so many ranks have a gradient of every parameter."""
        return bool((self._room[: self._count] == ranks).all())

    def seconds(self) -> list[float]:
        """After the sum: for each rank how long it computed; empty in large jobs."""
        numbers: list[float] = self._room[self._count : -2].tolist()
        return numbers

    def changed(self) -> int:
        """After the sum: on how many ranks parameters were frozen or thawed."""
        return round(float(self._room[-2]))

    def forwards(self) -> int:
        """After the sum: forwards of all ranks since the last average."""
        return round(float(self._room[-1]))
