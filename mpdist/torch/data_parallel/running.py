"""Running: the modules whose backwards run, in any thread: which may do so at one time, and in which order they end."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from mpdist.errors import UsageError
from mpdist.torch.data_parallel.bucket import Bucket

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.reducer import Reducer

numbers = count()
"""Of reducers: ranks that share several modules have wrapped them in the same order."""

# And the graph task of each.
_tasks: dict[Reducer, int] = {}


def check_apart(reducer: Reducer) -> None:
    """Raise where it begins beside one with the same parameters.

    What one of them has averaged, or begins to, the other would take for a gradient of this rank.
    """
    if not _tasks:
        return
    own = {id(slot.parameter): slot for slot in reducer.slots}
    for other in tuple(_tasks):
        if other is reducer:
            continue
        both = [own[id(slot.parameter)].name for slot in other.slots if id(slot.parameter) in own]
        if both and Bucket in (reducer.bucket_type, other.bucket_type):
            raise UsageError(
                f"DistributedDataParallel on {reducer.where}: {both[0]} is a parameter of "
                f"another one, too, on '{other.comm.name}', whose backward runs at the same time; wrap what both have "
                "once, or give gradient_as_bucket_view=False to both"
            )


def begin(reducer: Reducer, task: int) -> None:
    """Its backward runs."""
    _tasks[reducer] = task


def end(reducer: Reducer) -> None:
    """It runs no more."""
    _tasks.pop(reducer, None)


def task_of(reducer: Reducer) -> int | None:
    """The graph task of its backward; None where none runs."""
    return _tasks.get(reducer)


def together(reducer: Reducer) -> list[Reducer]:
    """Those in one backward with it, in the order in which they were wrapped."""
    task = _tasks[reducer]
    return sorted((each for each, its in list(_tasks.items()) if its == task), key=lambda each: each.number)
