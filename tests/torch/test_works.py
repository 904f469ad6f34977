"""Works and Futures as torch means them; messages between two ranks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpdist import UsageError, WorkTimeout
from mpdist.torch.errors import OperationTimeout

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(60)]


def ones(group: dist.ProcessGroup, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(group.rank() + 1))


def total(group: dist.ProcessGroup) -> float:
    return group.size() * (group.size() + 1) / 2


def test_a_work_can_be_asked(group: dist.ProcessGroup) -> None:
    x = ones(group)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True
    assert work.wait(timedelta(seconds=1)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert x.tolist() == [total(group)] * 3


def test_asking_makes_progress(group: dist.ProcessGroup) -> None:
    x = torch.full((300_000,), 1.0)[::3]  # strided: to be brought home
    work = dist.all_reduce(x, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
    assert set(x.tolist()) == {float(group.size())}


def test_progress_while_nobody_waits(group: dist.ProcessGroup) -> None:
    came = threading.Event()
    x = torch.ones(2_000_000)
    future = dist.all_reduce(x, async_op=True).get_future()
    future.add_done_callback(lambda _: came.set())
    assert came.wait(20)  # on a lock, which drives nothing
    assert x[-1].item() == group.size()
    assert future.value()[0] is x


def test_a_future_of_what_is_done_is_done(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(ones(group), async_op=True)
    work.wait()
    future = work.get_future()
    assert future.done()
    assert future is work.get_future()
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 3 * total(group)


def test_a_callback_starts_another_collective_and_waits_for_it(group: dist.ProcessGroup) -> None:
    def again(future: Any) -> float:
        y = future.value()[0].clone()
        dist.all_reduce(y)  # synchronous, on whichever thread this is
        z = torch.ones(1)
        dist.all_reduce(z, async_op=True).get_future().wait()
        chained = dist.all_reduce(z, async_op=True).get_future().then(lambda each: each.value()[0])
        return float(y[0] + chained.wait()[0])

    for _ in range(5):
        x = ones(group)
        result = dist.all_reduce(x, async_op=True).get_future().then(again)
        assert result.wait() == total(group) * group.size() + group.size() ** 2


def test_works_are_completed_in_any_order(group: dist.ProcessGroup) -> None:
    tensors = [torch.full((size,), 1.0) for size in (1, 100_000, 7, 50_000)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for place in (2, 0, 3, 1):
        works[place].wait()
        assert set(tensors[place].tolist()) == {float(group.size())}


def test_a_forgotten_work_does_no_harm(group: dist.ProcessGroup) -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(10_000), async_op=True)
        dist.all_reduce(torch.ones(100)[::2], async_op=True)
    gc.collect()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == group.size()


async def test_a_work_can_be_awaited(group: dist.ProcessGroup) -> None:
    x, y = torch.ones(200_000)[::2], ones(group)
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    (result,) = await first
    assert result is x
    await second
    ticking.cancel()
    assert set(x.tolist()) == {float(group.size())}
    assert y.tolist() == [total(group)] * 3
    dist.all_reduce(y)  # a synchronous call holds the loop, as everywhere in torch


def test_threads_wait_for_different_groups(group: dist.ProcessGroup) -> None:
    groups = [dist.new_group() for _ in range(3)]
    failures: list[BaseException] = []

    def work(own: Any) -> None:
        try:
            for step in range(50):
                x = torch.full((100,), float(step))
                dist.all_reduce(x, group=own)
                assert x[0].item() == step * group.size()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for own in groups:
        dist.destroy_process_group(own)


# ---------------------------------------------------------------------- messages


def test_a_ring_of_sends_and_receives(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64):
        for count in (0, 1, 100_000):
            x = torch.full((count,), 1.0 if dtype is torch.bool else float(rank)).to(dtype)
            y = torch.zeros(2 * count).to(dtype)[::2]  # strided
            sent, received = dist.isend(x, right), dist.irecv(y, left)
            received.wait()
            sent.wait()
            wanted = torch.full((count,), 1.0 if dtype is torch.bool else float(left)).to(dtype)
            assert torch.equal(
                y.view(torch.uint8) if False else y.float() if not y.is_complex() else y,
                wanted.float() if not wanted.is_complex() else wanted,
            )


def test_batched_messages(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    out = torch.zeros(size)
    ops = [
        op
        for peer in range(size)
        if peer != rank
        for op in (
            dist.P2POp(dist.irecv, out[peer : peer + 1], peer),
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), peer),
        )
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert out.tolist() == [float(peer) if peer != rank else 0.0 for peer in range(size)]


def test_receives_from_any_rank_and_by_tag(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    if rank == 0:
        found = {}
        for _ in range(size - 1):
            x = torch.zeros(1)
            src = dist.recv(x)
            found[src] = x.item()
        assert found == {peer: float(peer) for peer in range(1, size)}
        late, early = torch.zeros(1), torch.zeros(1)
        dist.recv(late, 1, tag=7)
        dist.recv(early, 1, tag=3)
        assert (late.item(), early.item()) == (7.0, 3.0)
    else:
        dist.send(torch.tensor([float(rank)]), 0)
        if rank == 1:
            works = [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (3, 7)]
            for work in works:
                work.wait()
    dist.barrier()


def test_a_message_to_oneself(group: dist.ProcessGroup) -> None:
    x, y = torch.arange(4.0), torch.zeros(4)
    works = [dist.isend(x, group.rank()), dist.irecv(y, group.rank())]
    for work in works:
        work.wait()
    assert torch.equal(x, y)


def test_objects_as_messages(group: dist.ProcessGroup) -> None:
    items: list[Any] = [{"a": torch.arange(3)}, "text"]
    if group.rank() == 0:
        dist.send_object_list(items, 1)
    elif group.rank() == 1:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, 0) == 0
        assert received[1] == "text"
        assert torch.equal(received[0]["a"], torch.arange(3))


def test_a_wait_that_is_too_long_withdraws_a_receive(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        x = torch.zeros(1)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            dist.irecv(x, 1, tag=99).wait(timedelta(milliseconds=300))
        assert 0.25 < time.monotonic() - start < 5
    dist.barrier()
    # The next receive gets the message, and not the one that was given up.
    if group.rank() == 1:
        dist.send(torch.tensor([5.0]), 0, tag=99)
    if group.rank() == 0:
        y = torch.zeros(1)
        dist.recv(y, 1, tag=99)
        assert (x.item(), y.item()) == (0.0, 5.0)


def test_a_receive_fails_after_the_timeout_of_its_group(group: dist.ProcessGroup) -> None:
    brief = dist.new_group(timeout=timedelta(seconds=1))
    if group.rank() == 0:
        with pytest.raises(OperationTimeout, match=r"recv from 1, tag 0 .*\n?.*not done after 1 s") as caught:
            dist.recv(torch.zeros(1), 1, group=brief)
        assert caught.value.waiting_for == (1,)
    dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x, group=brief)  # a withdrawn receive leaves the group usable
    assert x.item() == group.size()
    dist.destroy_process_group(brief)


def test_a_late_rank_is_named_and_the_group_refuses_further_use(group: dist.ProcessGroup) -> None:
    brief = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(5)
    dist.all_reduce(x, group=brief)
    late = group.size() - 1
    if group.rank() != late:
        with pytest.raises(OperationTimeout) as caught:
            dist.all_reduce(x, group=brief)
        text = str(caught.value)
        assert " Timed out " in text
        assert "all_reduce float32 x 5 sum #2" in text
        assert "test_works.py" in text  # the line of the call
        assert caught.value.waiting_for == (late,)
        with pytest.raises(RuntimeError, match="cannot be used any more") as caught_again:
            dist.all_reduce(x, group=brief)
        assert "all_reduce" in str(caught_again.value)
    dist.barrier()
    dist.destroy_process_group(brief)


def test_what_torchs_users_catch_is_caused_by_mpdists_own_error(group: dist.ProcessGroup) -> None:
    with pytest.raises(RuntimeError, match="complex") as caught:
        group.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX)
    assert isinstance(caught.value.__cause__, UsageError)

    async def wait_for(work: Any) -> None:
        work._posted.within(0.05)
        await work

    with pytest.raises(RuntimeError, match=" Timed out ") as caught:
        asyncio.run(wait_for(dist.irecv(torch.zeros(1), group.rank(), tag=97)))
    assert type(caught.value.__cause__) is WorkTimeout


def test_a_failed_future_tells_its_callbacks(group: dist.ProcessGroup) -> None:
    brief = dist.new_group(timeout=timedelta(seconds=1))
    if group.rank() == 0:
        future = dist.all_reduce(torch.ones(1), group=brief, async_op=True).get_future()
        chained = future.then(lambda done: done.value())
        with pytest.raises(RuntimeError, match=" Timed out "):
            chained.wait()
    dist.barrier()
    dist.destroy_process_group(brief)


def test_a_callback_of_a_failed_future_may_wait_for_another_work(group: dist.ProcessGroup) -> None:
    def go_on(failed: torch.futures.Future[list[torch.Tensor]]) -> float:
        with pytest.raises(RuntimeError, match=" Timed out "):
            failed.value()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        return float(future.then(lambda done: done.value()[0]).wait())  # of which Python knows nothing

    work: Any = dist.irecv(torch.zeros(1), group.rank(), tag=98)
    future = work.get_future().then(go_on)
    with pytest.raises(OperationTimeout):
        work.wait(timedelta(milliseconds=50))
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert future.done()
    assert future.value() == group.size()


def test_what_a_given_up_collective_sent_meets_no_later_group(group: dist.ProcessGroup) -> None:
    for _ in range(4):
        brief = dist.new_group(timeout=timedelta(milliseconds=200))
        if group.rank() == 0:
            with pytest.raises(OperationTimeout):
                dist.barrier(group=brief)
        dist.barrier()
        dist.destroy_process_group(brief)
        ranks = list(range(1, group.size()))
        part: Any = dist.new_group(ranks)
        if group.rank() in ranks:
            x = torch.full((8,), -1.0)
            blocks = [torch.full((8,), float(rank)) for rank in ranks]
            dist.scatter(x, blocks if group.rank() == 1 else None, src=1, group=part)
            assert x.tolist() == [float(group.rank())] * 8
            dist.destroy_process_group(part)


def test_a_second_wait_after_a_timeout_raises_what_programs_catch(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        work = dist.irecv(torch.zeros(1), 1)
        assert work is not None
        for _ in range(2):
            with pytest.raises(OperationTimeout):
                work.wait(timedelta(seconds=0.1))
    dist.barrier()


@pytest.mark.parametrize("how", ["sync", "wait", "await", "future"])
def test_what_a_barrier_follows_is_over(group: dist.ProcessGroup, how: str) -> None:
    async def wait_for(barrier: Any) -> None:
        await barrier

    for count in 3 * [2**16, 200_000]:  # one call of MPI, and several steps
        tensors = [torch.ones(count) for _ in range(8)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        barrier: Any = dist.barrier(async_op=how != "sync")
        if how == "wait":
            barrier.wait()
        elif how == "await":
            asyncio.run(wait_for(barrier))
        elif how == "future":
            assert barrier.get_future().wait() == []
        assert all((x == group.size()).all() for x in tensors)
        for work in works:
            work.wait()


def test_results_may_lie_where_their_inputs_do(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    lengths = [2 + (each if is_uneven else 0) for is_uneven in (False, True) for each in range(size)]
    for sizes in (lengths[:size], lengths[size:]):
        ranks = torch.cat([torch.full((length,), float(each)) for each, length in enumerate(sizes)])

        def own_part(sizes: list[int] = sizes) -> tuple[torch.Tensor, list[torch.Tensor]]:
            whole = torch.full((sum(sizes),), -1.0)
            parts = list(whole.split(sizes))
            parts[rank].fill_(rank)
            return whole, parts

        whole, parts = own_part()
        dist.all_gather(parts, parts[rank])
        assert whole.equal(ranks)
        whole, parts = own_part()
        dist.gather(parts[rank], parts if rank == 0 else None, 0)
        assert rank != 0 or whole.equal(ranks)
        whole = ranks.clone()
        parts = list(whole.split(sizes))
        dist.scatter(parts[rank], parts if rank == 0 else None, 0)
        assert (parts[rank] == rank).all()
        whole = ranks.clone()
        parts = list(whole.split(sizes))
        dist.reduce_scatter(parts[rank], parts)
        assert (parts[rank] == rank * size).all()
