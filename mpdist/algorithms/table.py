"""Table: which programs belong to which algorithm."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from mpdist.algorithms import hierarchical, in_order, ordered
from mpdist.algorithms.choose import OPERATIONS, Algorithm, Layout, Thresholds, starts
from mpdist.algorithms.shared import programs as shared

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

NEVER = sys.maxsize

INDIRECT = {"all_reduce": "indirect all_reduce", "reduce_scatter": "indirect reduce_scatter"}
"""What these are called where MPI's own call is not all, among the operations for which a size is known.

They take shared memory from 0 bytes on: one round of it does all, and what comes before and after MPI's call (integers
in the place of numbers to be compared, for example) takes longer than the call.
"""

_PROGRAMS: dict[Algorithm, ModuleType] = {Algorithm.SHARED: shared, Algorithm.HIERARCHICAL: hierarchical}


def ordered_algorithms(engine: Engine, ranks: Sequence[int]) -> ModuleType:
    """The programs that reduce in the order of ranks on a communicator of these ranks of the world."""
    layout = Layout.of([engine.nodes[rank] for rank in ranks], engine.is_sharing)
    return in_order if layout.nodes == 1 and layout.is_sharing else ordered


def large_algorithms(engine: Engine, ranks: Sequence[int]) -> tuple[ModuleType, Mapping[str, int]]:
    """The programs that take the place of MPI's own calls on a communicator, and from how many bytes on.

    Args:
        ranks: its members in the world.
    """
    layout = Layout.of([engine.nodes[rank] for rank in ranks], engine.is_sharing)
    thresholds = engine.thresholds if isinstance(engine.thresholds, Thresholds) else Thresholds()
    found = {op: starts(op, layout, thresholds) for op in OPERATIONS}
    algorithm = next((start[1] for start in found.values() if start is not None), Algorithm.SHARED)
    sizes = {op: NEVER if start is None else start[0] for op, start in found.items()}
    is_shared = found["all_reduce"] is not None and algorithm is Algorithm.SHARED
    return _PROGRAMS[algorithm], sizes | {indirect: 0 if is_shared else sizes[op] for op, indirect in INDIRECT.items()}
