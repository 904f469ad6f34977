"""Folding: slices of several ranks become one result, in one or several places."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpdist.errors import UsageError
from mpdist.memory import (
    BY_NAME,
    ELEMENTS,
    OP_NAMES,
    Element,
    Folder,
    as_op,
    check_op,
    finish,
    fold,
    narrow_into,
    premul_sum,
    widen,
)
from mpdist.memory.borrowed import torch_kernels
from mpdist.memory.folding import PAIR_BYTES


def fits(name: str, element: Element) -> bool:
    try:
        check_op(as_op(name), element)
    except UsageError:
        return False
    return True


PLAIN = [element for element in ELEMENTS if not element.is_half]
HALF = [element for element in ELEMENTS if element.is_half]
GRID = [(name, element) for element in ELEMENTS for name in OP_NAMES if fits(name, element)]
COUNTS = [0, 1, 7, 1000, 70_001]


def some(element: Element, count: int, seed: int) -> npt.NDArray[Any]:
    """Small random values in the element's storage."""
    values = np.random.default_rng(seed).integers(-4, 5, count)
    if element.is_half:
        out = np.empty(count, element.storage)
        narrow_into(values.astype(np.float32), out, element)
        return out
    return values.astype(element.storage)


def step_by_step(name: str, element: Element, sources: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The result by one whole-array step per source."""
    work = BY_NAME["float32"] if element.is_half else element
    wide = [widen(x, element) if element.is_half else x for x in sources]
    acc = wide[0].copy()
    for x in wide[1:]:
        fold(as_op(name), acc, x, work)
    finish(as_op(name), acc, len(sources), work)
    if not element.is_half:
        return acc
    out = np.empty(len(acc), element.storage)
    narrow_into(acc, out, element)
    return out


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "element"), GRID, ids=str)
def test_folding_is_step_by_step_reduction(name: str, element: Element, ranks: int, count: int) -> None:
    sources = [some(element, count, seed) for seed in range(ranks)]
    before = [x.tobytes() for x in sources]
    outs = [np.empty(count, element.storage) for _ in range(2)]
    Folder(as_op(name), element, ranks).fold(sources, outs)
    expected = step_by_step(name, element, sources)
    assert outs[0].tobytes() == outs[1].tobytes() == expected.tobytes()
    assert [x.tobytes() for x in sources] == before


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "element"), GRID, ids=str)
def test_into_memory_of_its_own_the_bits_are_the_same(name: str, element: Element, ranks: int, count: int) -> None:
    sources = [some(element, count, seed) for seed in range(ranks)]
    folder, (out, apart) = Folder(as_op(name), element, ranks), np.zeros((2, count), element.storage)
    folder.fold(sources, (out,))
    folder.fold_apart(sources, apart)
    assert apart.tobytes() == out.tobytes()


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_a_destination_may_be_any_source(element: Element, place: int) -> None:
    name = "sum" if element.kind != "bool" else "lxor"
    sources = [some(element, 70_001, seed) for seed in range(3)]
    expected = step_by_step(name, element, sources)
    outs = [np.empty_like(sources[0]), sources[place], sources[0]]
    Folder(as_op(name), element, 3).fold(sources, outs)
    assert all(out.tobytes() == expected.tobytes() for out in outs)


@pytest.mark.parametrize("element", [e for e in ELEMENTS if e.kind != "bool"], ids=str)
def test_each_source_has_its_own_factor(element: Element) -> None:
    sources = [some(element, 1000, seed) for seed in range(3)]
    out = np.empty_like(sources[0])
    Folder(premul_sum(2), element, 3, [2, 1, 3]).fold(sources, [out])
    expected = step_by_step("sum", element, [sources[i] for i in (0, 0, 1, 2, 2, 2)])
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("element", HALF, ids=str)
def test_a_partial_result_is_float32_and_joins_another_fold(element: Element) -> None:
    sources = [some(element, 1000, seed) for seed in range(4)]
    op = as_op("avg")
    partial = [np.empty(1000, np.float32) for _ in range(2)]
    Folder(op, element, None).fold(sources[:2], [partial[0]])
    Folder(op, element, None).fold(sources[2:], [partial[1]])
    out = np.empty_like(sources[0])
    Folder(op, element, 4).fold(partial, [out])
    assert out.tobytes() == step_by_step("avg", element, sources).tobytes()


# ---------------------------------------------------------------------- 16-bit types: every way, every value


def load_torch() -> None:
    pytest.importorskip("torch")


def unload_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def any_bits(element: Element, count: int, seed: int) -> npt.NDArray[Any]:
    """Every kind of value: denormal, huge, infinite, NaN."""
    return np.random.default_rng(seed).integers(0, 2**16, count, np.uint16).view(element.storage)


def modest(element: Element, count: int, seed: int) -> npt.NDArray[Any]:
    """Numbers of many magnitudes, denormals among them, whose sums are finite."""
    bits = any_bits(element, count, seed).view(np.uint16) & np.uint16(0xBFFF)
    return bits.view(element.storage)


VALUES = {"any": any_bits, "modest": modest}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["sum", "avg", "prod"])
@pytest.mark.parametrize("element", HALF, ids=str)
def test_the_bits_do_not_depend_on_torch(
    element: Element, name: str, ranks: int, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_torch()
    sources = [VALUES[values](element, 70_001, seed) for seed in range(ranks)]
    results = [np.empty_like(sources[0]) for _ in range(3)]
    folder = Folder(as_op(name), element, ranks)
    assert torch_kernels(element) is not None
    folder.fold(sources, results[:1])
    unload_torch(monkeypatch)
    assert torch_kernels(element) is None
    folder.fold(sources, results[1:2])
    wide = np.empty(len(results[2]), np.float32)  # a float32 result, rounded by itself
    folder.fold(sources, [wide, results[2]])
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def spacing(values: npt.NDArray[np.float64], element: Element) -> npt.NDArray[np.float64]:
    """From one value of the type to the next, there."""
    digits, smallest = (11, -24) if element.name == "float16" else (8, -133)
    _, exponents = np.frexp(values)
    steps: npt.NDArray[np.float64] = np.ldexp(1.0, np.maximum(exponents - digits, smallest))
    return steps


@pytest.mark.parametrize("element", HALF, ids=str)
def test_the_bits_do_not_depend_on_torchs_threads(element: Element) -> None:
    torch = pytest.importorskip("torch")
    sources = [any_bits(element, 300_001, seed) for seed in range(2)]
    outs = [np.empty_like(sources[0]) for _ in range(2)]
    before = torch.get_num_threads()
    try:
        for threads, out in zip((1, 2), outs, strict=True):
            torch.set_num_threads(threads)
            Folder(as_op("sum"), element, 2).fold(sources, [out])
    finally:
        torch.set_num_threads(before)
    assert outs[0].tobytes() == outs[1].tobytes()


def rounded(values: npt.NDArray[np.float64], element: Element) -> npt.NDArray[np.float64]:
    """The nearest values of the type, ties to even, computed in float64."""
    largest = 65504.0 if element.name == "float16" else 2.0**128 - 2.0**120
    step = spacing(values, element)
    nearest = np.rint(values / step) * step
    return np.where(np.abs(nearest) > largest, np.copysign(np.inf, values), nearest)


@pytest.mark.parametrize("torch_is_loaded", [True, False])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("element", HALF, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_two_terms_are_rounded_once(
    element: Element, values: str, torch_is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_torch() if torch_is_loaded else unload_torch(monkeypatch)
    a, b = (VALUES[values](element, 70_001, seed) for seed in (1, 2))
    if element.name == "bfloat16":  # where float32 does not lose a digit of a sum before the rounding
        b = (a ^ (b & np.uint16(0x83FF))).astype(np.uint16)
    out = np.empty_like(a)
    Folder(as_op("sum"), element, 2).fold([a, b], [out])
    exact = widen(a, element).astype(np.float64) + widen(b, element)
    assert np.array_equal(widen(out, element), rounded(exact, element), equal_nan=True)


@pytest.mark.parametrize("torch_is_loaded", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("element", HALF, ids=str)
def test_many_terms_differ_from_float64_by_one_rounding(
    element: Element, op: str, ranks: int, torch_is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_torch() if torch_is_loaded else unload_torch(monkeypatch)
    rng = np.random.default_rng(ranks)
    sources = [np.empty(70_001, element.storage) for _ in range(ranks)]
    for x in sources:
        narrow_into(rng.standard_normal(len(x)).astype(np.float32), x, element)
    out = np.empty_like(sources[0])
    Folder(as_op(op), element, ranks).fold(sources, [out])
    wide = np.array([widen(x, element) for x in sources], np.float64)
    exact = wide.sum(axis=0) / (ranks if op == "avg" else 1)
    # Half a spacing for the rounding, and what float32 lost before it: at most 2^-24 of the largest partial sum a term.
    lost = np.abs(wide).sum(axis=0) * ranks * 2.0**-24
    assert (np.abs(widen(out, element) - exact) <= spacing(exact, element) / 2 + lost).all()


@pytest.mark.parametrize("torch_is_loaded", [True, False])
@pytest.mark.parametrize("element", HALF, ids=str)
@pytest.mark.filterwarnings("error")
def test_infinity_and_nan_are_results_without_a_warning(
    element: Element, torch_is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_torch() if torch_is_loaded else unload_torch(monkeypatch)
    a, b = np.ones(2000, np.float32), np.ones(2000, np.float32)
    largest = 65504.0 if element.name == "float16" else float(np.float32(2.0**128 - 2.0**120))
    a[[3, 1001, 1500]] = [np.inf, np.nan, largest]
    b[[3, 1003, 1500]] = [-np.inf, -np.inf, largest]
    sources = [np.empty(2000, element.storage) for _ in range(2)]
    narrow_into(a, sources[0], element)
    narrow_into(b, sources[1], element)
    Folder(as_op("sum"), element, 2).fold(sources, [sources[1]])
    out = widen(sources[1], element)
    assert np.isnan(out[[3, 1001]]).all()
    assert out[[1003, 1500]].tolist() == [-np.inf, np.inf]
    assert (np.delete(out, [3, 1001, 1003, 1500]) == 2).all()


def test_torch_is_left_alone_while_one_of_its_modes_is_active() -> None:
    torch = pytest.importorskip("torch")
    element = BY_NAME["bfloat16"]
    with torch.device("meta"):
        assert torch_kernels(element) is None
    assert torch_kernels(element) is not None


def test_read_only_sources_are_fine() -> None:
    pytest.importorskip("torch")
    for element in HALF:
        a, b = some(element, 5000, 1), some(element, 5000, 2)
        expected = step_by_step("sum", element, [a, b])
        a.flags.writeable = False
        out = np.empty_like(a)
        Folder(as_op("sum"), element, 2).fold([a, b], [out])
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("torch_is_loaded", [True, False])
@pytest.mark.parametrize("element", HALF, ids=str)
def test_slices_may_start_at_any_element(
    element: Element, torch_is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_torch() if torch_is_loaded else unload_torch(monkeypatch)
    a, b, out = (some(element, 70_002, seed) for seed in range(3))
    Folder(as_op("sum"), element, 2).fold([a[1:], b[:-1]], [out[1:]])
    assert out[1:].tobytes() == step_by_step("sum", element, [a[1:], b[:-1]]).tobytes()
    assert out[0] == some(element, 70_002, 2)[0]


def test_threads_do_not_share_scratch() -> None:
    element = BY_NAME["bfloat16"]
    sources = [[any_bits(element, 300_000, 10 * thread + seed) for seed in range(3)] for thread in range(4)]
    outs = [np.empty_like(each[0]) for each in sources]
    folder = Folder(as_op("sum"), element, 3)
    threads = [threading.Thread(target=folder.fold, args=(x, [out])) for x, out in zip(sources, outs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, out in zip(sources, outs, strict=True):
        alone = np.empty_like(out)
        folder.fold(x, [alone])
        assert out.tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", ["int64", "float16", "bfloat16"])
def test_a_users_function_is_called_in_rank_order(name: str) -> None:
    element = BY_NAME[name]
    op = as_op(lambda a, b: a * 2 + b)
    sources = [some(element, 100, seed) for seed in range(3)]
    out = np.empty_like(sources[0])
    Folder(op, element, 3).fold(sources, [out, sources[2]])
    a, b, c = (
        widen(some(element, 100, seed), element) if element.is_half else some(element, 100, seed) for seed in range(3)
    )
    assert (widen(out, element) if element.is_half else out).tolist() == (a * 4 + b * 2 + c).tolist()
    assert sources[2].tobytes() == out.tobytes()


@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_products_are_the_same_bits_alone_and_in_place(dtype: str, terms: int) -> None:
    """NumPy multiplies one complex number by other rules where the result is an operand."""
    element = BY_NAME[dtype]
    folder = Folder(as_op("prod"), element, terms)
    limit = PAIR_BYTES // element.itemsize
    rng = np.random.default_rng(terms)
    for count in [*range(1, 40), limit + 1]:
        parts = [(rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(dtype) for _ in range(terms)]
        padded = [np.append(part, part[:1]) for part in parts]
        expected = np.empty(count + 1, dtype)
        folder.fold(padded, [expected])
        for place in range(terms + 1):
            sources = [part.copy() for part in parts]
            out = sources[place] if place < terms else np.empty(count, dtype)
            folder.fold(sources, [out])
            assert out.tobytes() == expected[:count].tobytes(), f"{count} elements, into source {place}"
        acc = parts[0].copy()
        for part in parts[1:]:
            fold(as_op("prod"), acc, part, element)
        assert acc.tobytes() == expected[:count].tobytes(), f"{count} elements, by steps"
