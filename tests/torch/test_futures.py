"""Futures: in which order those of a backward complete, and that each does."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_support.older import has_events_of_two_threads

import mpdist.torch.backward as backwards
import mpdist.torch.work as work_module
from mpdist.torch.futures import Future

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(60)]

LAYERS = 6


def backward(hook: Callable[[int], object]) -> None:
    """A backward in which the hook is called with 0, 1, ..., as DDP's is with its buckets."""
    x = torch.ones(1, requires_grad=True)
    for layer in reversed(range(LAYERS)):
        x = x * 1.0
        x.register_hook(lambda grad, layer=layer: hook(layer) and None)
    x.sum().backward()


def numbers(group: dist.ProcessGroup, layer: int, stage: int) -> Tensor:
    return torch.full((1 + layer + 100 * stage,), float(group.rank() + layer))


def total(group: dist.ProcessGroup, layer: int) -> float:
    return float(sum(rank + layer for rank in range(group.size())))


def test_what_callbacks_post_in_a_backward_is_in_one_order_on_all_ranks(group: dist.ProcessGroup) -> None:
    """As PowerSGD does: three collectives for each bucket, each posted by a callback of the one before."""
    done: list[tuple[int, int]] = []
    futures: list[Any] = []

    def post(layer: int, stage: int) -> None:
        time.sleep(0.003 * ((group.rank() + layer) % 2))

        def go_on(future: torch.futures.Future[list[Tensor]]) -> None:
            assert future.value()[0].unique().tolist() == [total(group, layer)]
            done.append((stage, layer))
            if stage < 2:
                post(layer, stage + 1)

        work = dist.all_reduce(numbers(group, layer, stage), async_op=True)
        futures.append(work.get_future().then(go_on))

    for _ in range(3):
        backward(lambda layer: post(layer, 0))
        for future in futures:  # grows while it is gone through
            future.wait()
        assert done == [(stage, layer) for stage in range(3) for layer in range(LAYERS)]
        done.clear()
        futures.clear()


# At its end DDP with a static graph waits in C++.
WAITS_FOR_ALL: dict[str, Callable[[list[Any]], object]] = {
    "in Python": torch.futures.wait_all,
    "in C++": lambda futures: torch._C._collect_all(futures).wait(),
    "not at all": lambda futures: None,
}


@pytest.mark.parametrize("way", WAITS_FOR_ALL)
@pytest.mark.parametrize("has_posted_before", [False, True], ids=["", "posted before"])
def test_what_is_posted_at_the_end_of_a_backward_goes_on_in_order(
    group: dist.ProcessGroup, way: str, has_posted_before: bool
) -> None:
    """On a late rank each is done before its Future is asked for, on the others none is before all are posted."""
    done: list[int] = []

    def post(layer: int, stage: int) -> torch.futures.Future[None]:
        def go_on(future: torch.futures.Future[list[Tensor]]) -> None:
            assert future.value()[0].unique().tolist() == [total(group, layer)]
            done.append(layer)
            if stage == 0:
                post(layer, 1)

        work = dist.all_reduce(numbers(group, layer, stage), async_op=True)
        if group.rank() == stage == 0:
            time.sleep(0.005)
        return work.get_future().then(go_on)

    def at_end() -> None:
        WAITS_FOR_ALL[way]([post(layer, 0) for layer in range(LAYERS)])
        assert way == "not at all" or done[:LAYERS] == list(range(LAYERS))

    def queue(layer: int) -> None:
        if layer == 0 and has_posted_before:
            dist.all_reduce(numbers(group, layer, 0), async_op=True).get_future()
        if layer == LAYERS - 1:
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

    backward(queue)
    deadline = time.monotonic() + 20
    while len(done) < 2 * LAYERS and time.monotonic() < deadline:
        time.sleep(0.001)
    assert done == 2 * list(range(LAYERS))


def test_ddp_with_a_static_graph_and_a_hook_of_two_collectives(group: dist.ProcessGroup) -> None:
    """Its first backward posts all buckets at its end. Rank 0 comes late to each."""
    net = torch.nn.Sequential(*(torch.nn.Linear(3 + layer, 4 + layer) for layer in range(LAYERS)))
    options: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": 1e-5, "process_group": group}
    model = torch.nn.parallel.DistributedDataParallel(net, **options)
    buckets: list[int] = []

    def hook(_: object, bucket: Any) -> Any:
        gradients = bucket.buffer()
        buckets.append(bucket.index())
        work = dist.all_reduce(gradients, async_op=True)
        if group.rank() == 0:
            time.sleep(0.005)

        def go_on(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            twice = torch.cat([gradients, gradients])  # of other size: does it meet another rank's first, that fails
            dist.all_reduce(twice)
            return twice[: len(gradients)] / group.size() ** 2

        return work.get_future().then(go_on)

    hook.__annotations__.clear()  # torch wants its own classes, or none
    model.register_comm_hook(None, hook)
    x = torch.ones(2, 3)
    for _ in range(3):
        net.zero_grad()
        model(x * (1 + group.rank())).sum().backward()
        found = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        for rank in range(group.size()):
            (net(x * (1 + rank)).sum() / group.size()).backward()
        for ours, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad)
    assert len(set(buckets)) > 1


def test_a_hook_may_wait_for_its_future_and_what_becomes_of_it(group: dist.ProcessGroup) -> None:
    found: list[float] = []

    def wait(layer: int) -> None:
        if layer == 0:  # which is held back while the others complete
            dist.all_reduce(numbers(group, 0, 1), async_op=True).get_future()
            return
        future = dist.all_reduce(numbers(group, layer, 0), async_op=True).get_future()
        if layer % 3 == 0:
            while not future.done():
                time.sleep(0.001)
            found.append(float(future.value()[0][0]))
        elif layer % 3 == 1:
            found.append(float(future.wait()[0][0]))
        else:
            found.append(future.then(lambda f: f.value()[0]).then(lambda f: float(f.value()[0])).wait())

    backward(wait)
    assert found == [total(group, layer) for layer in range(1, LAYERS)]


def test_a_work_that_was_waited_for_in_a_backward_has_its_future_at_once(group: dist.ProcessGroup) -> None:
    """As stock DDP's join reads how many ranks still train."""
    found: list[float] = []

    def post(layer: int) -> None:
        work = dist.all_reduce(numbers(group, layer, 0), async_op=True)
        if layer % 2:  # asked for before, and held back until then
            work.get_future()
        work.wait()
        found.append(float(work.get_future().value()[0][0]))

    backward(post)
    assert found == [total(group, layer) for layer in range(LAYERS)]


def test_a_callback_that_raises_is_its_own_future_s_error(group: dist.ProcessGroup) -> None:
    futures: list[Any] = []

    def post(layer: int) -> None:
        future = dist.all_reduce(numbers(group, layer, 0), async_op=True).get_future()
        futures.append(future.then(lambda f: 1 // 0 if layer == 1 else float(f.value()[0][0])))

    backward(post)
    for layer, future in enumerate(futures):
        if layer == 1:
            with pytest.raises(ZeroDivisionError):
                future.wait()
        else:
            assert future.wait() == total(group, layer)


def test_a_hook_may_wait_for_several_futures(group: dist.ProcessGroup) -> None:
    found: list[float] = []

    def wait(layer: int) -> None:
        works = [dist.all_reduce(numbers(group, layer, stage), async_op=True) for stage in range(2)]
        if layer % 2:
            results = torch.futures.wait_all([work.get_future() for work in works])
            found.append(float(results[1][0][0]))
        else:
            both = torch.futures.collect_all([work.get_future() for work in works])
            found.append(both.then(lambda done: float(done.value()[1].value()[0][0])).wait())

    backward(wait)
    assert found == [total(group, layer) for layer in range(LAYERS)]


WAITS: dict[str, Callable[[Any, Any], object]] = {
    "future.wait": lambda work, future: future.wait(),
    "work.wait": lambda work, future: work.wait(),
    "future.done": lambda work, future: [time.sleep(0.0001) for _ in iter(future.done, True)],
}


@pytest.mark.parametrize("way", WAITS)
def test_after_a_backward_futures_complete_in_order_whichever_is_waited_for(group: dist.ProcessGroup, way: str) -> None:
    """Collected ones, too. Rank 0 comes so late that the backward of the others is over before."""
    done: list[tuple[int, int]] = []
    works: list[Any] = []
    futures: list[Any] = []

    def post(layer: int, stage: int) -> None:
        if layer == stage == group.rank() == 0:
            time.sleep(3 * backwards.UNMOVED_SECONDS)

        def go_on(both: torch.futures.Future[Any]) -> None:
            assert [each.value()[0].unique().item() for each in both.value()] == [total(group, layer)] * 2
            done.append((stage, layer))
            if stage == 0:
                post(layer, 1)

        both = [dist.all_reduce(numbers(group, layer, stage), async_op=True) for _ in range(2)]
        works.append(both[1])
        futures.append(torch.futures.collect_all([work.get_future() for work in both]).then(go_on))

    for _ in range(3):
        backward(lambda layer: post(layer, 0))
        for work, future in reversed(list(zip(works, futures, strict=True))):
            WAITS[way](work, future)
        for future in futures:  # grows while it is gone through
            future.wait()
        assert done == [(stage, layer) for stage in range(2) for layer in range(LAYERS)]
        for each in (done, works, futures):
            each.clear()


class _Failed(Exception):
    pass


def test_several_futures_fail_with_the_first_that_fails(group: dist.ProcessGroup) -> None:
    def bring() -> None:
        raise _Failed("no place")

    for collect in (torch.futures.wait_all, lambda each: torch.futures.collect_all(each).wait()):
        works: list[Any] = [dist.all_reduce(numbers(group, 0, stage), async_op=True) for stage in range(3)]
        works[1]._finish, works[1]._finishing = bring, threading.Lock()
        with pytest.raises(_Failed, match="no place"):
            collect([work.get_future() for work in works])
    dist.barrier()


def test_futures_of_a_backward_that_fails_complete_and_are_not_kept(group: dist.ProcessGroup) -> None:
    futures: list[Any] = []
    running = backwards._running
    before = set(running)  # those that another test's error holds

    def kept() -> set[int]:
        return set(running) - before

    def fail(layer: int) -> None:
        futures.append(dist.all_reduce(numbers(group, layer, 0), async_op=True).get_future().then(lambda f: f.value()))
        if layer == 2:
            raise _Failed

    for _ in range(2):
        with pytest.raises(_Failed):
            backward(fail)
    deadline = time.monotonic() + 20
    while not all(future.done() for future in futures) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [float(future.value()[0][0]) for future in futures] == [total(group, layer) for layer in range(3)] * 2
    while kept() and time.monotonic() < deadline:  # the last callback's frame goes
        time.sleep(0.001)
    assert not kept()


def test_garbage_may_be_collected_while_a_future_is_made(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that has failed may be in it, and completes its Futures, on whatever thread that is."""
    failed: Any = dist.all_reduce(numbers(group, 0, 0), async_op=True)
    failed.wait()

    def make(work: Any) -> Future:
        failed.complete()
        return Future(work)

    monkeypatch.setattr(work_module, "Future", make)
    future = dist.all_reduce(numbers(group, 1, 0), async_op=True).get_future()
    assert future.wait()[0].unique().tolist() == [total(group, 1)]


def test_a_failed_backward_may_become_garbage_wherever_that_is_found(group: dist.ProcessGroup) -> None:
    """Its callbacks may wait, and the thread that finds it may hold the lock of whoever drives."""
    waiter: Any = group._waiter  # type: ignore[attr-defined]  # ours
    kept: list[object] = []
    results: list[Any] = []

    def fail(layer: int) -> None:
        work: Any = dist.all_reduce(numbers(group, layer, 0), async_op=True)

        def go_on(future: torch.futures.Future[list[Tensor]]) -> float:
            dist.all_reduce(future.value()[0])
            return float(future.value()[0][0])

        results.append(work.get_future().then(go_on))
        kept.append(backwards.running_backward(waiter))
        waiter.wait(work._posted)
        raise _Failed

    with pytest.raises(_Failed) as caught:
        backward(fail)
    caught.value.__traceback__ = None
    with waiter.engine.lock:
        kept.clear()
        gc.collect()
    assert results[0].wait() == group.size() * total(group, 0)


def net(group: dist.ProcessGroup) -> torch.nn.parallel.DistributedDataParallel:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10), process_group=group)


@pytest.mark.parametrize("mistake", ["late", "another collective"])
def test_ddp_waits_in_cxx_for_a_bucket_that_fails_and_says_why(group: dist.ProcessGroup, mistake: str) -> None:
    part: Any = dist.new_group(timeout=timedelta(seconds=20))
    model = net(part)
    model(torch.ones(2, 100)).sum().backward()
    part.set_timeout(timedelta(seconds=0.5))
    reason = r"OperationTimeout: mpdist: Timed out : all_reduce float32 x 1010"
    if mistake == "another collective":  # refused on the rank that comes later
        reason += r"|differs between ranks.*all_reduce int64 x 1"
    if group.rank() == 0:
        with pytest.raises(RuntimeError, match=reason):
            model(torch.ones(2, 100)).sum().backward()
    elif mistake == "another collective":
        with contextlib.suppress(RuntimeError):  # refused here, or there: then it waits
            dist.all_reduce(torch.ones(1, dtype=torch.int64), group=part)
    dist.barrier()
    dist.destroy_process_group(part)


def test_ddp_tells_of_a_hook_whose_callback_raises(group: dist.ProcessGroup) -> None:
    model = net(group)

    def go_on(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        assert future.value()[0].shape == (1010,)
        raise _Failed("in the callback")

    def hook(_: object, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(go_on)

    hook.__annotations__.clear()  # torch wants its own classes, or none

    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="_Failed: in the callback"):
        model(torch.ones(2, 100)).sum().backward()
    dist.barrier()


def test_a_result_that_cannot_be_brought_to_its_place_fails_the_future(group: dist.ProcessGroup) -> None:
    def bring() -> None:
        raise _Failed("no place")

    work: Any = dist.all_reduce(numbers(group, 0, 0), async_op=True)
    work._finish, work._finishing = bring, threading.Lock()
    with pytest.raises(_Failed, match="no place"):
        work.get_future().wait()


@pytest.mark.parametrize("is_backward", [False, True], ids=["outside", "in a backward"])
def test_tensors_are_freed_without_the_garbage_collector(group: dist.ProcessGroup, is_backward: bool) -> None:
    """As a hook that compresses has them; some 20 MB of each step stayed till garbage was collected."""
    tensors: list[weakref.ref[Tensor]] = []
    futures: list[Any] = []

    def post(layer: int) -> None:
        x = torch.full((5000,), float(group.rank() + layer))  # of works with smaller ones a group keeps some
        tensors.append(weakref.ref(x))
        time.sleep(0.003 * group.rank())  # the others wait for it
        future = dist.all_reduce(x, async_op=True).get_future()
        futures.extend((future, future.then(lambda done: done.value()[0].sum().item())))

    gc.collect()
    gc.disable()
    try:
        if is_backward:
            backward(post)
        else:
            for layer in range(LAYERS):
                post(layer)
        assert [each.wait() for each in futures[1::2]] == [5000 * total(group, layer) for layer in range(LAYERS)]
        futures.clear()
        end = time.monotonic() + 5
        while any(tensor() is not None for tensor in tensors) and time.monotonic() < end:
            time.sleep(0.001)  # another thread may have found it done, and still look
        assert [tensor() for tensor in tensors] == [None] * LAYERS
    finally:
        gc.enable()
    dist.barrier()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profiler_waits_for_no_event_for_ever(group: dist.ProcessGroup) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(150):
            dist.all_reduce(torch.ones(100), async_op=True).get_future().then(lambda f: 1).wait()
            dist.broadcast(torch.ones(2), 0)
    counts = {each.key: each.count for each in profiled.key_averages() if each.key.startswith("mpdist:")}
    shown = {"mpdist:all_reduce": 150, "mpdist:broadcast": 150}
    assert counts == (shown if has_events_of_two_threads() else {})
