"""Waiting: which waits nothing but their operations can end, as the control thread sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

import numpy as np
import pytest

import mpdist
from mpdist.progress.engine import Engine
from mpdist.runtime.waiting import Waits, place, waits

# What it looks at are the threads of the process and what is in its loop: other modules leave some there.
pytestmark = [pytest.mark.ranks(2), pytest.mark.apart]

Comm = mpdist.Communicator


async def seen_in(comm: Comm, waiting: Awaitable[object]) -> Waits:
    """What another thread sees when this task has waited so long that the Engine sleeps; then the wait is cancelled."""
    engine, loop, task = comm._channel.engine, asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    found = []

    def look() -> None:
        while task._fut_waiter is None or not engine.ticking.is_asleep:  # it may still sleep since an earlier test
            time.sleep(0.001)  # in another thread: nothing tells it
        found.append(waits(engine))
        loop.call_soon_threadsafe(task.cancel)

    await asyncio.sleep(0)  # tasks made before come to their waits
    watcher = threading.Thread(target=look, name="mpdist-watcher")
    watcher.start()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    task.uncancel()
    watcher.join()
    return found[0]


def peer(comm: Comm) -> int:
    return 1 - comm.rank


@contextlib.contextmanager
def a_thread() -> Iterator[None]:
    """Another thread of the program, that may do anything."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


@contextlib.contextmanager
def an_idle_pool() -> Iterator[None]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield


@contextlib.contextmanager
def a_timer() -> Iterator[None]:
    timer = asyncio.get_running_loop().call_later(600, print)
    yield
    timer.cancel()


@contextlib.contextmanager
def a_descriptor() -> Iterator[None]:
    loop = asyncio.get_running_loop()
    descriptor, other = os.pipe()
    loop.add_reader(descriptor, print)
    yield
    loop.remove_reader(descriptor)
    os.close(descriptor)
    os.close(other)


@contextlib.contextmanager
def a_sleeper() -> Iterator[None]:
    task = asyncio.create_task(asyncio.sleep(600))
    yield
    task.cancel()


Beside = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.mark.parametrize("beside", [contextlib.nullcontext, a_thread, an_idle_pool, a_descriptor])
async def test_a_receive_of_one_rank_ends_only_by_its_message(comm: Comm, beside: Beside) -> None:
    receive = comm.recv(src=peer(comm))
    with beside():
        seen = await seen_in(comm, receive)
    assert [waiter.work for waiter in seen.together] == [receive]
    assert not seen.perhaps


@pytest.mark.parametrize("waits_for", ["its receive", "its send"])
async def test_a_sendrecv_is_what_is_waited_for_not_its_parts(comm: Comm, waits_for: str) -> None:
    if comm.rank == 1:
        if waits_for == "its send":
            await comm.send(np.arange(3), 0)
        await comm.barrier()
        if waits_for == "its receive":
            await comm.send(np.arange(3), 0)
        await comm.recv()
        return
    work = comm.sendrecv(np.zeros(500_000), 1, np.zeros(3, int))
    seen = await seen_in(comm, work)
    assert [waiter.work for waiter in seen.together] == [work]
    assert "test_waiting.py" in seen.together[0].place
    assert work.cancelled()
    await comm.barrier()
    assert (await comm.recv()).data.tolist() == [0, 1, 2]


@pytest.mark.parametrize("beside", [contextlib.nullcontext, an_idle_pool])
async def test_a_receive_of_any_rank_ends_only_by_messages_of_others_while_nothing_runs_here(
    comm: Comm, beside: Beside
) -> None:
    receive = comm.recv()
    with beside():
        seen = await seen_in(comm, receive)
    assert [waiter.work for waiter in seen.together] == [receive]


@pytest.mark.parametrize("beside", [a_thread, a_sleeper])
async def test_a_receive_of_any_rank_may_get_a_message_of_its_own_rank(comm: Comm, beside: Beside) -> None:
    with beside():
        assert await seen_in(comm, comm.recv()) == Waits()


async def test_a_timer_may_end_any_wait(comm: Comm) -> None:
    with a_timer():
        assert await seen_in(comm, comm.recv(src=peer(comm))) == Waits()


async def test_a_task_that_sleeps_may_withdraw_the_receive_of_the_main_task(comm: Comm) -> None:
    receive = comm.recv(src=peer(comm))
    with a_sleeper():
        seen = await seen_in(comm, receive)
    assert [waiter.work for waiter in seen.perhaps] == [receive]
    assert not seen.surely
    assert not seen.together


@contextlib.asynccontextmanager
async def a_listener(comm: Comm) -> AsyncIterator[None]:
    async def listen() -> None:
        async for message in comm.messages(src=peer(comm)):
            print(message)

    task = asyncio.create_task(listen())
    yield
    task.cancel()
    await asyncio.wait([task])


WAITS_FOR_TASKS: dict[str, Callable[[], Awaitable[object]]] = {
    "queue": lambda: asyncio.Queue[int]().get(),
    "event": lambda: asyncio.Event().wait(),
    "wait": lambda: asyncio.wait([asyncio.get_running_loop().create_future()]),
    "gather": lambda: asyncio.gather(asyncio.get_running_loop().create_future()),
}


@pytest.mark.parametrize("what", WAITS_FOR_TASKS)
async def test_a_queue_is_filled_by_tasks(comm: Comm, what: str) -> None:
    async with a_listener(comm):
        seen = await seen_in(comm, WAITS_FOR_TASKS[what]())
    assert [waiter.work.op for waiter in seen.together] == ["messages"]


@pytest.mark.parametrize("what", WAITS_FOR_TASKS)
@pytest.mark.parametrize("beside", [a_thread, a_timer, a_descriptor])
async def test_a_queue_may_be_filled_from_outside(comm: Comm, what: str, beside: Beside) -> None:
    async with a_listener(comm):
        with beside():
            assert await seen_in(comm, WAITS_FOR_TASKS[what]()) == Waits()


async def test_a_callback_of_an_operation_may_set_a_task_going(comm: Comm) -> None:
    both = [comm.recv(src=peer(comm), tag=1), comm.recv(src=peer(comm), tag=2)]
    async with a_listener(comm):
        seen = await seen_in(comm, asyncio.wait(both))
    assert {waiter.work.op for waiter in seen.together} == {"recv", "messages"}
    assert len(seen.together) == 3
    assert all(receive.cancel() for receive in both)


# ---------------------------------------------------------------------- the line


def in_a_loop_that_runs_for_ever(main: Coroutine[object, object, None]) -> None:
    loop = asyncio.new_event_loop()
    beside = loop.create_task(asyncio.sleep(600))  # older, and not of the user's program
    task = loop.create_task(main)
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    task.result()
    beside.cancel()
    loop.run_until_complete(asyncio.wait([beside]))
    loop.close()


@pytest.mark.parametrize("run", [asyncio.run, in_a_loop_that_runs_for_ever])
def test_the_line_is_known_before_the_first_operation(run: Callable[[Coroutine[object, object, None]], None]) -> None:
    engine, found = Engine(), []

    async def load_batch() -> None:
        loop, task, over = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        assert task is not None

        def look() -> None:
            while task._fut_waiter is None or asyncio.current_task(loop) is not None:
                time.sleep(0.001)  # in another thread: nothing tells it
            found.append(place(engine))
            loop.call_soon_threadsafe(over.set)

        watcher = threading.Thread(target=look, name="mpdist-watcher")
        watcher.start()
        await over.wait()
        watcher.join()

    run(load_batch())
    assert re.search(r"test_waiting.py:\d+ in load_batch: await over.wait\(\)$", found[0]), found
