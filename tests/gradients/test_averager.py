"""GradientAverager: arrays are averaged step after step, in whatever order they come."""

from __future__ import annotations

import asyncio
import mmap
import random
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import CollectiveMismatch, Communicator, GradientAverager, SizeMismatch, UsageError
from mpdist.gradients.packing import Packing

pytestmark = pytest.mark.ranks(1, 2, 3)

SHAPES = [(3,), (2, 5), (), (1000,), (0,), (7, 1)]


def filled(step: int, rank: int, dtype: str = "float64") -> list[np.ndarray]:
    return [np.full(shape, (index + 1) * (rank + 1) + step, dtype) for index, shape in enumerate(SHAPES)]


def refill(arrays: list[np.ndarray], step: int, rank: int) -> None:
    for x, value in zip(arrays, filled(step, rank), strict=True):
        x[...] = value


def check(arrays: list[np.ndarray], step: int, size: int) -> None:
    """They hold the mean of what the ranks had in this step."""
    mean_rank = (size + 1) / 2
    for index, (x, shape) in enumerate(zip(arrays, SHAPES, strict=True)):
        np.testing.assert_allclose(x, np.full(shape, (index + 1) * mean_rank + step), rtol=1e-15)


async def test_a_process_that_averages_keeps_the_memory_that_it_frees(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("mpdist.gradients.averager.keep_freed", kept.append)
    arrays = filled(0, comm.rank)
    await GradientAverager(comm, arrays)
    check(arrays, 0, comm.size)
    assert kept == [1024 * 1024**2]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
async def test_arrays_hold_the_mean_after_each_step(comm: Communicator, bucket_bytes: int) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays, bucket_bytes=bucket_bytes)
    for step in range(4):
        refill(arrays, step, comm.rank)
        for index in reversed(range(len(arrays))):
            averager.ready(index)
        results = await averager
        assert all(result is x for x, result in zip(arrays, results, strict=True))
        check(arrays, step, comm.size)


async def test_each_rank_may_have_an_order_of_its_own(comm: Communicator) -> None:
    order = random.Random(comm.rank)
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays, bucket_bytes=40)
    for step in range(6):
        refill(arrays, step, comm.rank)
        for index in order.sample(range(len(arrays)), len(arrays)):
            averager.ready(index)
        await averager
        check(arrays, step, comm.size)


def test_ready_may_come_from_any_thread(comm: Communicator) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays, bucket_bytes=40)
    for step in range(5):
        refill(arrays, step, comm.rank)
        threads = [threading.Thread(target=averager.ready, args=(index,)) for index in range(len(arrays))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        averager.wait()
        check(arrays, step, comm.size)


async def test_arrays_that_were_not_said_ready_are_so_at_the_end(comm: Communicator) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays)
    if comm.rank == 0:
        averager.ready(2)
    await averager
    averager.ready(1)
    await averager  # averages of averages
    check(arrays, 0, comm.size)


async def test_full_buckets_start_before_the_end(comm: Communicator) -> None:
    arrays = [np.full(100, float(comm.rank)) for _ in range(3)]
    averager = GradientAverager(comm, arrays, bucket_bytes=800)
    for index in (2, 0, 1):
        averager.ready(index)
    await averager
    assert averager.order == [2, 0, 1]
    posted = comm._channel.sequence
    averager.ready(0)
    assert comm._channel.sequence == posted  # bucket 2 is before it
    averager.ready(2)
    assert comm._channel.sequence == posted + 2
    await averager


@pytest.mark.parametrize(("op", "expected"), [("sum", sum), ("max", max)])
async def test_other_ops(comm: Communicator, op: str, expected: Callable[[range], int]) -> None:
    x = np.full(4, comm.rank + 1, np.int64)
    await GradientAverager(comm, [x], op=op)
    assert x.tolist() == [expected(range(1, comm.size + 1))] * 4


@pytest.mark.parametrize("compress", ["float16", "bfloat16"])
async def test_compressed_means_are_those_of_16_bits(comm: Communicator, compress: str) -> None:
    values = np.random.default_rng(0).normal(size=(comm.size, 1000))
    for dtype in ("float32", "float64"):
        x = values[comm.rank].astype(dtype)
        counts = np.arange(3)
        await GradientAverager(comm, [x, counts], op="sum", compress=compress)
        error = np.abs(x - values.sum(axis=0)).max()
        assert 0 < error < (0.004 if compress == "float16" else 0.04)
        assert counts.tolist() == [0, comm.size, 2 * comm.size]  # integers are left alone
    x = values[comm.rank].astype("float32")
    await GradientAverager(comm, [x], compress=compress)
    assert np.abs(x - values.mean(axis=0)).max() < (0.002 if compress == "float16" else 0.02)


async def test_float16_does_not_overflow_in_the_sum(comm: Communicator) -> None:
    x = np.full(5, 60000, np.float16)
    await GradientAverager(comm, [x])
    assert x.tolist() == [60000] * 5


async def test_cancelled_await_goes_on_where_it_stopped(comm: Communicator) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays, bucket_bytes=8)
    steps = averager.__await__()
    steps.close()
    await averager
    check(arrays, 0, comm.size)


async def _result(averager: GradientAverager) -> list[np.ndarray]:
    return await averager


@pytest.mark.ranks(2, 3)
async def test_another_task_may_end_a_step(comm: Communicator) -> None:
    """That of asyncio.gather does, and before Python 3.12 that of asyncio.wait_for."""
    arrays = filled(0, comm.rank)
    async with comm.dup() as own:
        averager = GradientAverager(own, arrays, bucket_bytes=1)
        await averager
        for step in range(3):
            refill(arrays, step, comm.rank)
            if comm.rank:
                await comm.barrier()
            averager.ready(len(arrays) - 1)
            averager.ready(len(arrays) - 2)
            ending = asyncio.create_task(_result(averager))
            if not comm.rank:
                await asyncio.sleep(0)  # all buckets are posted, and the others have not begun
                await comm.barrier()
            await ending
            check(arrays, step, comm.size)


@pytest.mark.ranks(2, 3)
async def test_a_collective_beside_another_tasks_end_of_a_step_is_refused(comm: Communicator) -> None:
    async with comm.dup() as own:
        averager = GradientAverager(own, filled(0, comm.rank), bucket_bytes=1)
        await averager
        if comm.rank:
            await comm.barrier()
            await averager
            return
        averager.ready(len(SHAPES) - 1)
        ending = asyncio.create_task(_result(averager))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match=r"barrier .* while all_reduce of task .* is pending"):
            own.barrier()
        await comm.barrier()
        await ending


@pytest.mark.ranks(2, 3)
async def test_end_of_a_step_beside_another_tasks_collective_is_refused(comm: Communicator) -> None:
    async with comm.dup() as own:
        averager = GradientAverager(own, filled(0, comm.rank), bucket_bytes=1)
        await averager
        if comm.rank:
            await comm.barrier()
        averager.ready(len(SHAPES) - 1)
        barrier = own.barrier()
        if not comm.rank:
            with pytest.raises(UsageError, match=r"all_reduce .* while barrier of task .* is pending"):
                await asyncio.create_task(_result(averager))
            await comm.barrier()
        await barrier


# ---------------------------------------------------------------------- what has failed


class Fragile:
    """A sum that fails for arrays of `count` elements."""

    count = -1

    def __call__(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.size == self.count:
            raise ZeroDivisionError("it broke")
        return a + b


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_step_after_one_that_failed(comm: Communicator, everywhere: bool) -> None:
    arrays, op = filled(0, comm.rank), Fragile()
    averager = GradientAverager(comm, arrays, bucket_bytes=1, op=op)
    for step, count in enumerate([-1, 10, -1, 1000, -1]):
        refill(arrays, step, comm.rank)
        op.count = count if everywhere or comm.rank == 0 else -1
        for index in range(len(arrays)):
            averager.ready(index)
        if op.count > 0:
            with pytest.raises(mpdist.CommunicationError, match="ZeroDivisionError: it broke"):
                averager.wait()
            continue
        averager.wait()
        check([x / comm.size for x in arrays], step, comm.size)


@pytest.mark.ranks(2, 3)
async def test_a_failed_step_is_over_when_all_its_messages_are(comm: Communicator) -> None:
    """They use the memory of the buckets; and a cancelled await does not make the failure forgotten."""
    arrays, op = [np.full(count, float(comm.rank)) for count in (1, 2)], Fragile()
    averager = GradientAverager(comm, arrays, bucket_bytes=1, op=op)
    averager.ready(0)
    await averager
    op.count = 1
    averager.ready(0)
    if comm.rank == 0:
        averager.ready(1)
        assert averager._buckets is not None
        first, second = (bucket.work for bucket in averager._buckets)
        assert first is not None
        assert second is not None
        ending = asyncio.create_task(_result(averager))
        await asyncio.wait([first])
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ending.done()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert not second.done()
        await asyncio.gather(*(comm.send(np.zeros(0), rank) for rank in range(1, comm.size)))
    else:
        await comm.recv(src=0)
    with pytest.raises(mpdist.CommunicationError, match="it broke"):
        await averager
    op.count = -1
    arrays[0][:] = arrays[1][:] = 1
    assert [x.tolist() for x in await averager] == [[comm.size], [comm.size] * 2]


@pytest.mark.ranks(2, 3)
async def test_where_the_communicator_is_lost_a_step_ends_with_the_first_failure(comm: Communicator) -> None:
    arrays, op = [np.full(count, float(comm.rank)) for count in (1, 2)], Fragile()
    async with comm.dup() as own:
        averager = GradientAverager(own, arrays, bucket_bytes=1, op=op)
        averager.ready(0)
        await averager
        op.count = 1
        averager.ready(0)
        if comm.rank == 0:
            averager.ready(1)  # the others answer later
            own._channel.give_up("so a test wants it")
            for _ in range(2):
                with pytest.raises(mpdist.CommunicationError, match="it broke"):
                    await averager
            with pytest.raises(mpdist.ClosedError, match="cannot be used any more: so a test wants it"):
                averager.ready(0)
            await asyncio.gather(*(comm.send(np.zeros(0), rank) for rank in range(1, comm.size)))
            assert averager._buckets is not None
            await averager._buckets[1].work
            return
        await comm.recv(src=0)
        with pytest.raises(mpdist.CommunicationError, match="it broke"):
            await averager


# ---------------------------------------------------------------------- what is refused


async def test_ready_twice_is_refused(comm: Communicator) -> None:
    averager = GradientAverager(comm, filled(0, comm.rank))
    averager.ready(1)
    with pytest.raises(UsageError, match="array 1 was ready before"):
        averager.ready(1)
    await averager


@pytest.mark.parametrize("index", [-1, 1, "a", None, 0.5])
async def test_an_index_of_no_array_is_refused(comm: Communicator, index: int) -> None:
    averager = GradientAverager(comm, [np.zeros(3)])
    with pytest.raises(UsageError, match=re.escape(f"index is {index!r}, the arrays are 0 to 0")):
        averager.ready(index)
    averager.ready(np.int64(0))  # type: ignore[arg-type]  # an integer
    await averager


async def test_an_index_is_any_integer(comm: Communicator) -> None:
    """Of an array of one the end of the step failed, on its own rank: it has no hash."""
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays)
    indices = [np.array(index) if comm.rank == 0 else index for index in (2, 0, 1)]
    for index in indices:
        averager.ready(index)  # type: ignore[arg-type]  # an integer, too
    await averager
    assert averager.order is not None
    assert averager.order[:3] == [2, 0, 1]


async def test_another_shape_is_refused(comm: Communicator) -> None:
    averager = GradientAverager(comm, [np.zeros(3)], names=["weight"])
    with pytest.raises(SizeMismatch, match=r"weight is float64 \(4,\), it was float64 \(3,\)"):
        averager.ready(0, np.zeros(4))


@pytest.mark.ranks(2, 3)
async def test_difference_between_ranks_names_array_and_ranks(comm: Communicator) -> None:
    shape = (3, 4) if comm.rank == 1 else (4, 3)
    averager = GradientAverager(comm, [np.zeros(2), np.zeros(shape)])
    with pytest.raises(CollectiveMismatch, match=r"number 1 is array 1 float64 \(4, 3\) on rank.*\(3, 4\) on rank 1"):
        await averager


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("option", "values", "text"),
    [
        ("op", ("avg", "sum"), r"op avg, .* on rank 0; op sum, .* on rank"),
        ("op", (np.add, np.maximum), r"op <add>, .* on rank 0; op <maximum>, .* on rank"),
        ("compress", (None, "bfloat16"), r".*, compress None, .* on rank 0; .*, compress 'bfloat16', .* on rank"),
        ("bucket_bytes", (1000, 1e6), r".*, bucket_bytes 1000 on rank 0; .*, bucket_bytes 1000000 on rank"),
    ],
)
async def test_what_ranks_do_with_the_arrays_is_compared(
    comm: Communicator, option: str, values: tuple[object, object], text: str
) -> None:
    """The mean is folded into the copy: with sums on other ranks they all got something in between."""
    x = np.full(5, float(comm.rank), np.float32)
    averager = GradientAverager(comm, [x], **{option: values[min(comm.rank, 1)]})  # type: ignore[arg-type]
    with pytest.raises(CollectiveMismatch, match=f"^settings differ between the ranks of 'world.*': {text}"):
        await averager
    assert (x == comm.rank).all()


@pytest.mark.ranks(2, 3)
async def test_equal_settings_may_be_written_differently(comm: Communicator) -> None:
    x = np.full(5, float(comm.rank))
    await GradientAverager(comm, [x], bucket_bytes=1_000_000 if comm.rank else 1e6)  # type: ignore[arg-type]  # an integer
    assert (x == (comm.size - 1) / 2).all()


@pytest.mark.ranks(2, 3)
def test_error_is_raised_again(comm: Communicator) -> None:
    averager = GradientAverager(comm, [np.zeros(3 if comm.rank else 4)])
    errors = []
    for _ in range(2):
        with pytest.raises(CollectiveMismatch) as raised:
            averager.wait()
        errors.append(raised.value)
    assert errors[0] is errors[1]


@pytest.mark.parametrize(
    ("arrays", "options", "text"),
    [
        ([np.zeros(2, np.int32)], {}, "avg"),
        ([np.zeros(2)], {"compress": "int8"}, "compress is 'int8'"),
        ([np.zeros(2)], {"compress": ["float16"]}, r"compress is \['float16'\]; it must be 'float16'"),
        ([np.zeros(2)], {"bucket_bytes": 0}, "bucket_bytes is 0"),
        ([np.zeros(2)], {"bucket_bytes": "x"}, "bucket_bytes is 'x'; it must be a positive number"),
        ([np.zeros(2)], {"names": ["a", "b"]}, "got 2 names for 1 arrays; give one for each"),
        ([np.zeros(2)] * 2, {"names": ["a"]}, "got 1 names for 2 arrays"),
        ([np.zeros((4, 4))[:, 1]], {}, "array 0: "),
        ([3.0], {}, "array 0: "),
        (np.zeros(2), {}, r"arrays is a numpy.ndarray; it must be a list of arrays: write \[x\]"),
        ({"a": np.zeros(2)}, {}, r"arrays is .*dict.*; it must be a list of arrays: give list\(arrays.values\(\)\)"),
    ],
)
async def test_bad_arguments_are_refused(comm: Communicator, arrays: Any, options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        GradientAverager(comm, arrays, **options)


# ---------------------------------------------------------------------- average


async def test_average_of_a_tree(comm: Communicator) -> None:
    tree = {"layer": [np.full((2, 2), float(comm.rank)), None], "bias": (np.array(comm.rank, np.float32),)}
    result = await mpdist.average(comm, tree)
    mean = (comm.size - 1) / 2
    assert result["layer"][0] is tree["layer"][0]
    assert result["layer"][1] is None
    assert np.all(result["layer"][0] == mean)
    assert result["bias"][0] == mean


def test_average_without_a_loop(comm: Communicator) -> None:
    x = np.full(3, float(comm.rank))
    assert mpdist.average(comm, x).wait() is x
    assert np.all(x == (comm.size - 1) / 2)


async def test_average_that_is_awaited_twice_averages_once(comm: Communicator) -> None:
    x = np.full(3, float(comm.rank))
    averaging = mpdist.average(comm, [x, np.broadcast_to(x[:1], (1,))], op="sum")
    result = await averaging
    total = sum(range(comm.size))
    for _ in range(2):
        assert await averaging is result
        assert result[0] is x
        assert [each.tolist() for each in result] == [[total] * 3, [total]]


async def test_average_of_read_only_arrays_comes_back_new(comm: Communicator) -> None:
    x = np.full((2, 3), float(comm.rank))
    x.flags.writeable = False
    (result,) = await mpdist.average(comm, [x])
    assert result.shape == (2, 3)
    assert np.all(result == (comm.size - 1) / 2)
    assert np.all(x == comm.rank)


def test_average_that_nobody_waits_for_is_told_of(comm: Communicator) -> None:
    with pytest.warns(RuntimeWarning, match="neither awaited nor waited for"):
        mpdist.average(comm, [np.ones(3)])


async def test_average_of_nothing(comm: Communicator) -> None:
    assert await mpdist.average(comm, {}) == {}


async def test_average_of_a_defaultdict(comm: Communicator) -> None:
    tree = defaultdict(list, b=np.full(2, float(comm.rank)))
    result = await mpdist.average(comm, tree)
    assert result["b"] is tree["b"]
    assert result["b"].tolist() == [(comm.size - 1) / 2] * 2
    assert result["new"] == []


async def test_tree_that_cannot_be_made_anew_is_refused_before_anything_is_sent(comm: Communicator) -> None:
    class Fixed(tuple[np.ndarray]):
        def __new__(cls) -> Fixed:
            return super().__new__(cls, [np.full(2, float(comm.rank))])

    tree, posted = Fixed(), comm._channel.sequence
    with pytest.raises(UsageError, match="cannot be made anew with other arrays"):
        mpdist.average(comm, tree)
    assert comm._channel.sequence == posted
    assert tree[0].tolist() == [comm.rank] * 2


class Sealed:
    """As pyarrow's arrays: others may read them, and only their library makes them."""

    def __init__(self, *arguments: object) -> None:
        if arguments:
            raise TypeError("Do not call Sealed's constructor directly")
        self.values = np.zeros(3)
        self.shape = self.values.shape

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__()


@pytest.mark.parametrize("make", [Sealed, lambda: mmap.mmap(-1, 16, access=mmap.ACCESS_READ)])
async def test_an_array_that_cannot_be_made_anew_is_refused_before_it_is_sent(
    comm: Communicator, make: Callable[[], object]
) -> None:
    """At the end of a step it was a bare TypeError, on its rank alone, and no later step could end there."""
    x = make()
    posted = comm._channel.sequence
    with pytest.raises(UsageError, match=r"^array 1: got an? .*, which can't be written"):
        GradientAverager(comm, [np.zeros(1), x], op="max")
    with pytest.raises(UsageError, match=r"^\['x'\]: got an? .*, which can't be written, and none can be made"):
        mpdist.average(comm, {"x": x}, op="max")
    assert comm._channel.sequence == posted


async def test_a_tree_that_is_no_array_is_called_tree(comm: Communicator) -> None:
    with pytest.raises(UsageError, match=r"^tree: got a str; needed an array"):
        mpdist.average(comm, "abc")


@pytest.mark.ranks(2, 3)
async def test_average_names_the_key_that_differs(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"\['w'\] float64 \(\) on rank 0; .*\['v'\]"):
        await mpdist.average(comm, {"v" if comm.rank else "w": np.zeros(())})


# ---------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
async def test_torch_tensors(comm: Communicator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.full(shape, float(comm.rank), dtype=getattr(torch, dtype)) for shape in SHAPES]
    results = await GradientAverager(comm, tensors, bucket_bytes=64)
    for x, result in zip(tensors, results, strict=True):
        assert result is x
        assert torch.all(x == (comm.size - 1) / 2)


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("compress", [None, "bfloat16"])
async def test_gradients_that_zero_grad_has_dropped_are_told_of(
    comm: Communicator, compress: str | None, is_ready: bool
) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 2)
    for p in module.parameters():
        p.data.fill_(0.5)

    def backward(scale: float, *, set_to_none: bool) -> None:
        module.zero_grad(set_to_none=set_to_none)
        (module(torch.ones(1, 3)).sum() * scale * (comm.rank + 1)).backward()

    backward(1.0, set_to_none=False)
    parameters = [*module.parameters()]
    averager = GradientAverager(comm, [p.grad for p in parameters], compress=compress, names=["weight", "bias"])

    async def step(*given: Any) -> None:
        for i, gradient in enumerate(given or [None] * is_ready * 2):
            averager.ready(i, gradient)
        await averager

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1.0, 1.0, 2.0):
            backward(scale, set_to_none=False)
            await step()
            assert torch.all(parameters[0].grad == scale * (comm.size + 1) / 2)
        backward(3.0, set_to_none=True)
        await step(*(p.grad for p in parameters))
        assert torch.all(parameters[0].grad == 3.0 * (comm.size + 1) / 2)
    backward(4.0, set_to_none=True)
    with pytest.warns(UserWarning, match=r"^weight is as the last step has left it"):
        await step()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        await step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_jax_arrays_come_back_new(comm: Communicator, dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.full((2, 3), float(comm.rank), dtype)
    averager = GradientAverager(comm, [x])
    for step in range(3):
        averager.ready(0, x + step)
        (result,) = await averager
        assert type(result) is type(x)
        assert result.dtype == x.dtype
        assert result.shape == (2, 3)
        assert np.all(np.asarray(result, np.float64) == (comm.size - 1) / 2 + step)
        assert np.all(np.asarray(x, np.float64) == comm.rank)


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_tensor_may_get_other_memory_between_steps(comm: Communicator, is_ready: bool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)
    averager = GradientAverager(comm, [tensor])
    for step in range(3):
        tensor.data = torch.full((1000,), float(comm.rank + step))
        if is_ready:
            averager.ready(0)
        await averager
        assert tensor.tolist() == [(comm.size - 1) / 2 + step] * 1000
    tensor.data = tensor.data.double()
    with pytest.raises(SizeMismatch, match="float64"):
        averager.ready(0)


async def test_an_array_that_changes_while_its_step_is_under_way_ends_it(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)
    averager = GradientAverager(comm, [tensor])
    await averager
    averager.ready(0)
    tensor.data = tensor.data.double()
    with pytest.raises(SizeMismatch, match=r"array 0 is float64 .*it was float32"):
        await averager
    tensor.data = torch.full((1000,), float(comm.rank))
    averager.ready(0)
    await averager
    assert tensor.tolist() == [(comm.size - 1) / 2] * 1000


async def test_an_array_that_could_not_be_copied_is_copied_by_the_next_try(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays)
    await averager
    refill(arrays, 1, comm.rank)
    with monkeypatch.context() as patch:
        patch.setattr(Packing, "enter", raising(MemoryError))
        with pytest.raises(MemoryError):
            averager.ready(0)
    averager.ready(0)
    await averager
    check(arrays, 1, comm.size)


def test_the_end_of_a_step_waits_for_what_another_thread_copies(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = filled(0, comm.rank)
    averager = GradientAverager(comm, arrays)
    averager.wait()
    refill(arrays, 1, comm.rank)
    enter, is_copying = Packing.enter, threading.Event()

    def slowly(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_copying.set()
            time.sleep(0.1)
        enter(*arguments)

    monkeypatch.setattr(Packing, "enter", slowly)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(averager.ready, 1)
        assert is_copying.wait(10)
        averager.wait()
        ready.result()
    check(arrays, 1, comm.size)
    refill(arrays, 2, comm.rank)
    averager.wait()
    check(arrays, 2, comm.size)


def raising(kind: type[Exception]) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise kind

    return call


async def test_means_are_those_of_all_reduce_without_a_warning(comm: Communicator) -> None:
    with np.errstate(all="raise"):
        values = np.array([np.inf, 1 - 2j, np.inf * 1j], np.complex64)
        wanted = await comm.all_reduce(values.copy(), "avg")
        arrays = [values.copy(), np.array([1e-45, 3e38], np.float32)]
        await GradientAverager(comm, arrays)
        np.testing.assert_array_equal(arrays[0].view(np.float32), wanted.view(np.float32))
        assert arrays[1][1] == pytest.approx(3e38)
        large = np.full(3, 1e300)
        await GradientAverager(comm, [large], compress="float16")
        assert np.isinf(large).all()
