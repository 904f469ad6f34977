"""Table: which programs belong to which algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from mpdist.algorithms import hierarchical, in_order, ordered
from mpdist.algorithms.choose import Algorithm, Layout, Thresholds, sizes
from mpdist.algorithms.shared import programs as shared

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

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
    algorithm, start_of = sizes(layout, thresholds)
    return _PROGRAMS[algorithm], start_of
