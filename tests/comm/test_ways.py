"""By which way an array of a device travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpdist.algorithms import native, ordered, uneven
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared import programs as shared
from mpdist.algorithms.uneven import Parcel
from mpdist.comm.ways import MAX_BYTES, Way, way, way_of_message
from mpdist.config import DEVICE_OPERATIONS
from mpdist.memory import BY_NAME, HOST, Buffer, as_buffer, as_op
from mpdist.progress import wire
from mpdist.progress.collective import one_call

X = as_buffer(np.zeros(6, np.float32))
SUM, AVERAGE, LARGEST = (Reduction.of(as_op(op), X.element, 2) for op in ("sum", "avg", "max"))
BFLOAT = Reduction.of(as_op("sum"), BY_NAME["bfloat16"], 2)
HUGE = Buffer(None, MAX_BYTES + 1, MAX_BYTES + 1, BY_NAME["uint8"], HOST, False, None, 4096)
ROWS = Parcel.of_rows(X, 2, (3,))


class Transport:
    def ibroadcast(self) -> None: ...
    def iall_gather(self) -> None: ...
    def iall_to_all(self) -> None: ...


def spread() -> None: ...


MPI = Transport()

SINGLE: list[tuple[str, Any, list[Any]]] = [
    ("broadcast", one_call, [MPI.ibroadcast, (X, 0), X]),
    ("all_gather", one_call, [MPI.iall_gather, (X, X), X]),
    ("all_to_all", one_call, [MPI.iall_to_all, (X, X), X]),
    ("gather", native.gather, [X, None, 0]),
    ("scatter", uneven.scatter, [spread, ROWS, X, 0, None]),
    ("scatter", uneven.scatter, [spread, None, X, 0, None]),
    ("all_reduce", native.all_reduce, [None, X, SUM]),
    ("reduce", native.reduce, [X, X, SUM, 0]),
    ("reduce_scatter", native.reduce_scatter, [X, X, SUM]),
    ("scan", native.scan, [X, X, SUM]),
    ("exscan", native.exscan, [X, X, SUM]),
]


@pytest.mark.parametrize(("op", "program", "arguments"), SINGLE)
def test_one_call_of_mpi_gets_the_array_if_it_takes_it(op: str, program: Any, arguments: list[Any]) -> None:
    assert way(op, program, arguments, {op}.__contains__, 100) is Way.GIVEN
    assert way(op, program, arguments, ({*DEVICE_OPERATIONS} - {op}).__contains__, 100) is Way.STAGED


@pytest.mark.parametrize(
    ("op", "program", "arguments"),
    [
        ("all_reduce", shared.all_reduce, [None, None, X, SUM]),
        ("all_reduce", ordered.all_reduce, [None, None, X, SUM]),
        ("all_reduce", native.all_reduce_by_function, [X, X, as_op(lambda a, b: a)]),
        ("all_reduce", native.all_reduce, [None, X, AVERAGE]),
        ("all_reduce", native.all_reduce, [None, X, LARGEST]),
        ("all_reduce", native.all_reduce, [None, X, BFLOAT]),
        ("reduce_scatter", native.reduce_scatterv, [X, X, [3, 3], SUM]),
        ("broadcast", shared.broadcast, [None, X, 0]),
        ("broadcast", one_call, [print, (X, 0), X]),
        ("broadcast", one_call, [MPI.ibroadcast, (HUGE, 0), HUGE]),
        ("gather", native.gather, [X, HUGE, 0]),
        ("gather", uneven.gather, [X, None, 0, None]),
        ("scatter", uneven.scatter, [spread, ROWS, None, 0, None]),
        ("scatter", uneven.scatter, [spread, Parcel.refused("why", 2), X, 0, None]),
        ("scatter", uneven.scatter, [spread, Parcel.of_blocks([X, X]), X, 0, None]),
        ("barrier", one_call, [MPI.ibroadcast, (), None]),
    ],
)
def test_everything_else_is_staged(op: str, program: Any, arguments: list[Any]) -> None:
    assert way(op, program, arguments, lambda op: True, 100) is Way.STAGED


def test_a_scatter_that_goes_through_shared_memory_is_staged() -> None:
    arguments = [spread, ROWS, X, 0, None]
    assert way("scatter", uneven.scatter, arguments, lambda op: True, 12) is Way.STAGED
    assert way("scatter", uneven.scatter, [spread, None, X, 0, None], lambda op: True, 24) is Way.STAGED


def test_a_message_is_given_to_mpi_if_it_takes_it_and_in_one_piece() -> None:
    assert way_of_message("send", wire.PIECE_BYTES, {"send"}.__contains__) is Way.GIVEN
    assert way_of_message("send", wire.PIECE_BYTES + 1, {"send"}.__contains__) is Way.STAGED
    assert way_of_message("recv", 1, {"send"}.__contains__) is Way.STAGED
