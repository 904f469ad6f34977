"""Moving: the same bits wherever the sources and the results lie, and no source is overwritten too early."""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpdist.algorithms.shared import moving
from mpdist.algorithms.shared.moving import Folding, fold
from mpdist.memory import BY_NAME, Folder, address_of, as_op, narrow_into
from mpdist.transport.reach import Reach, Remote

Values = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows processes each other's memory")

WIDTH = 96
"""Elements of a part, where three sources share what SCRATCH_BYTES is patched to."""

# Ops that NumPy folds source by source, one that divides at the end, and types and ops that take more.
KINDS = [
    ("sum", "float32"),
    ("avg", "float64"),
    ("max", "int64"),
    ("land", "bool"),
    ("avg", "complex64"),
    ("prod", "complex64"),
    ("sum", "bfloat16"),
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "SCRATCH_BYTES", 3 * 4 * WIDTH)
    monkeypatch.setattr(moving, "BLOCK_BYTES", 4 * WIDTH)


def inputs(name: str, count: int, size: int) -> list[Values]:
    element = BY_NAME[name]
    made = []
    for rank in range(size):
        values = np.random.default_rng(rank).integers(0 if name == "bool" else -4, 5, count)
        x = np.empty(count, element.storage)
        if element.is_half:
            narrow_into(values.astype(np.float32), x, element)
        else:
            x[:] = values
        made.append(x)
    return made


def remote(x: Values) -> Remote:
    """As another process would see it."""
    return Remote(Reach({0: os.getpid()}), 0, address_of(x), x.size, x.dtype)


def folded(folder: Folder, sources: list[Values]) -> Values:
    out = np.empty_like(sources[0])
    folder.fold(sources, [out])
    return out


@pytest.mark.parametrize("count", [0, 1, WIDTH, 5 * WIDTH + 7])
@pytest.mark.parametrize(("op", "name"), KINDS)
@pytest.mark.parametrize("far", list(product([False, True], repeat=3)))
def test_in_place_over_all_sources(op: str, name: str, far: tuple[bool, ...], count: int) -> None:
    """What an all_reduce in place does: the results go where the sources were."""
    arrays = inputs(name, count, 3)
    folder = Folder(as_op(op), BY_NAME[name], 3)
    wanted = folded(folder, arrays)
    memory = [remote(x) if is_far else x for x, is_far in zip(arrays, far, strict=True)]
    fold(folder, memory, memory)
    for x in arrays:
        assert x.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(("op", "name"), KINDS)
@pytest.mark.parametrize("is_far", [False, True])
def test_into_one_of_the_sources_seen_as_another_array(op: str, name: str, is_far: bool, at: int) -> None:
    """As where a rank gives its x as out, too: nothing says that they are the same memory."""
    arrays = inputs(name, 3 * WIDTH + 5, 4)
    folder = Folder(as_op(op), BY_NAME[name], 4)
    wanted = folded(folder, arrays)
    kept = [x.copy() for x in arrays]
    sources = [remote(x) if is_far and rank != at else x for rank, x in enumerate(arrays)]
    fold(folder, sources, [arrays[at][:]])
    for rank, x in enumerate(arrays):
        assert x.tobytes() == (wanted if rank == at else kept[rank]).tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "name"), KINDS)
@pytest.mark.parametrize("far", [(False,), (True,), (False, True), (True, False), (True, True)])
def test_into_other_memory(op: str, name: str, far: tuple[bool, ...], size: int) -> None:
    arrays = inputs(name, 3 * WIDTH + 5, size)
    folder = Folder(as_op(op), BY_NAME[name], size)
    wanted = folded(folder, arrays)
    kept = [x.copy() for x in arrays]
    outs = [np.empty_like(arrays[0]) for _ in far]
    sources = [remote(x) if rank % 2 else x for rank, x in enumerate(arrays)]
    fold(folder, sources, [remote(x) if is_far else x for x, is_far in zip(outs, far, strict=True)])
    assert [x.tobytes() for x in outs] == [wanted.tobytes()] * len(outs)
    assert [x.tobytes() for x in arrays] == [x.tobytes() for x in kept]


def test_a_remote_source_is_read_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And into a room that the next one takes: all rooms together would leave the cache."""
    arrays = inputs("float32", WIDTH, 4)
    rooms: list[int] = []
    read = Remote.read_into

    def noted(self: Remote, target: Values, start: int = 0) -> None:
        rooms.append(address_of(target))
        read(self, target, start)

    monkeypatch.setattr(Remote, "read_into", noted)
    folder = Folder(as_op("sum"), BY_NAME["float32"], None)
    out = np.empty_like(arrays[0])
    folding = Folding(folder, [arrays[0], *map(remote, arrays[1:])], [out])
    folding.fold(0, folding.width)
    assert len(rooms) == 3
    assert len(set(rooms)) == 1
    assert out[: folding.width].tobytes() == folded(folder, arrays)[: folding.width].tobytes()
