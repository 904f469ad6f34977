"""Goals of bench/collectives.py: what is promised, against what, as data."""

from __future__ import annotations

from dataclasses import dataclass

from copying import COPY  # beside this script

from mpdist.bench.case import GLOO, OURS, RAW_NOW, RESIDENT
from mpdist.bench.sizes import UNITS

KIB, MIB = UNITS["K"], UNITS["M"]
RAW = "mpi4py"


@dataclass(frozen=True)
class Goal:
    """A ratio that is promised, or only shown.

    Attributes:
        against: a contender, or RAW for the faster of mpi4py's calls.
        target: None: only shown.
        is_inverse: theirs / ours, the larger the better.
    """

    ours: str
    against: str
    target: float | None = None
    stretch: float | None = None
    is_inverse: bool = False


@dataclass(frozen=True)
class Row:
    """What is measured in the same rounds, and the goals that it is held against."""

    op: str
    nbytes: int
    goals: tuple[Goal, ...]


def two_rank_rows(mpi: str) -> list[Row]:
    """The table of targets, by operation and size."""
    small = {"MPICH": 1.5}.get(mpi, 2.5)
    others = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
    return [
        Row("all_reduce", 8, (Goal(OURS, RAW_NOW, small), Goal(OURS, GLOO, 0.02))),
        Row(
            "all_reduce",
            64 * KIB,
            (Goal(OURS, RAW, 0.85, 0.7), Goal(RESIDENT, RAW, 0.65, 0.5), Goal(OURS, GLOO, 0.03)),
        ),
        Row("all_reduce", MIB, (Goal(OURS, RAW, 0.8, 0.7), Goal(RESIDENT, RAW, 0.55, 0.45), Goal(OURS, GLOO, 0.2))),
        Row(
            "all_reduce",
            16 * MIB,
            (Goal(OURS, RAW, 0.8, 0.7), Goal(RESIDENT, RAW, 0.5, 0.4), Goal(RESIDENT, COPY, 1.2, 1.4, is_inverse=True)),
        ),
        Row(
            "all_reduce",
            64 * MIB,
            (
                Goal(OURS, RAW, 0.4, 0.3),
                Goal(RESIDENT, RAW, 0.35, 0.25),
                Goal(OURS, GLOO, 0.3),
                Goal(RESIDENT, COPY, 0.9, 1.0, is_inverse=True),
            ),
        ),
        *(Row(op, 16 * MIB, (Goal(OURS, RAW, 0.8, 0.6),)) for op in others),
        Row("barrier", 0, (Goal(OURS, RAW_NOW, small),)),
    ]


FOUR_RANK_ROWS = [Row("all_reduce", 16 * MIB, (Goal(OURS, RAW, 0.5), Goal(RESIDENT, RAW, 0.5)))]


def several_node_rows(local: int) -> list[Row]:
    """Between nodes with so many ranks each."""
    others = ("reduce", "reduce_scatter", "all_gather", "broadcast")
    return [
        Row("all_reduce", 16 * MIB, (Goal(OURS, RAW, 0.6 if local == 2 else None),)),
        *(Row(op, 16 * MIB, (Goal(OURS, RAW),)) for op in others),
        *(Row(op, MIB, (Goal(OURS, RAW),)) for op in ("all_reduce", *others)),
        Row("all_reduce", 8, (Goal(OURS, RAW),)),
        Row("barrier", 0, (Goal(OURS, RAW),)),
    ]
