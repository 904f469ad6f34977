"""Execution: one rank's run of a random program.

Every step is posted when its turn comes; whether its result is awaited at once,
together with others, or at the end, is drawn by a generator that differs between
ranks. A rank never awaits what another rank may post only after a step that this
rank has not come to: so whatever hangs is a fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from comm.devices import HOMES, Gpu, there
from random_programs.programs import (
    COLLECTIVES,
    GROUPS,
    Step,
    block_size,
    expected,
    fold,
    item,
    split_key,
    values,
)

import mpdist
from mpdist import Communicator

Check = Callable[[Any], None]


class Execution:
    """One rank's run."""

    def __init__(self, comm: Communicator, steps: list[Step], chance: random.Random, gpu: Gpu | None = None) -> None:
        """Take a GPU on which some arrays are to be."""
        self._comms: list[Communicator] = [comm]
        self._me = comm.rank
        self._steps = steps
        self._chance = chance
        self._gpu = gpu
        self._pending: list[tuple[Step, Awaitable[Any], Check]] = []
        self._at_the_end: list[Callable[[], None]] = []
        self._unmet: list[mpdist.Work[Any]] = []

    async def run(self) -> None:
        """Take all steps, check all results, close what was made."""
        for step in self._steps:
            if step.part_of(self._me) is not None:
                await self._take(step)
                await self._wait_perhaps()
            elif step.kind in GROUPS:
                raise AssertionError("every rank is in a part of every communicator")
        for post in self._chance.sample(self._at_the_end, len(self._at_the_end)):
            post()
        await self._finish(self._pending)
        for work in self._unmet:
            assert work.cancel(), work
        for made in reversed(self._comms[1:]):
            await made.close()

    async def _take(self, step: Step) -> None:
        if step.kind in GROUPS:
            self._comms.append(await self._make(step))
        elif step.kind in COLLECTIVES:
            work = self._post_collective(step)
            self._expect(step, work, lambda got: check_equal(got, expected(step, self._me), step))
        elif step.kind == "cancel":
            self._cancel_some()
            self._unmet.append(self._comms[step.comm].recv(tag=step.tag))
        else:
            self._exchange(step)

    def _expect(self, step: Step, work: Awaitable[Any], check: Check) -> None:
        self._pending.append((step, work, check))

    async def _wait_perhaps(self) -> None:
        draw = self._chance.random()
        if draw < 0.35 and self._pending:
            await self._finish([self._pending.pop(self._chance.randrange(len(self._pending)))])
        elif draw < 0.5:
            some = self._chance.sample(self._pending, len(self._pending) // 2)
            self._pending = [each for each in self._pending if each not in some]
            await self._finish(some)
        elif draw < 0.7:
            await asyncio.sleep(0)

    async def _finish(self, some: list[tuple[Step, Awaitable[Any], Check]]) -> None:
        results = await asyncio.gather(*(work for _, work, _ in some))
        for (_, _, check), result in zip(some, results, strict=True):
            check(result)

    # ------------------------------------------------------------------ communicators

    async def _make(self, step: Step) -> Communicator:
        parent = self._comms[step.comm]
        if step.kind == "dup":
            return await parent.dup()
        if step.kind == "subgroup":
            return await parent.subgroup(list(reversed(range(parent.size))))
        part = step.part_of(self._me)
        assert part is not None
        return await parent.split(part.index(self._me) % 2, split_key(step, self._me))

    # ------------------------------------------------------------------ messages

    def _exchange(self, step: Step) -> None:
        comm = self._comms[step.comm]
        if step.kind == "any source":
            self._all_to_one(step, comm)
            return
        if step.kind == "sendrecv":
            self._around_the_ring(step, comm)
            return
        part = step.part_of(self._me)
        assert part is not None
        if step.src not in part:
            return
        if self._me == step.dst:
            self._receive(step, comm, part.index(step.src))
        if self._me == step.src:
            self._send(step, comm, part.index(step.dst))

    def _there(self, array: np.ndarray[Any, Any]) -> Any:
        """The array, perhaps on the GPU, there perhaps in memory that others reach."""
        gpu = self._gpu
        if gpu is None or self._chance.random() < 0.4:
            return array
        if self._chance.random() < 0.07:
            gpu.give_back_all()
        return there(self._comms[0], gpu, array, self._chance.choice(HOMES))

    def _send(self, step: Step, comm: Communicator, dst: int) -> None:
        work: mpdist.Work[None]
        if step.kind == "object":
            work = comm.send_object(item(step, step.src), dst, step.tag)
        else:
            work = comm.send(self._there(values(step, step.src, step.size)), dst, step.tag)
        if step.kind == "late":  # its receive may be posted at the very end
            self._at_the_end.append(lambda: self._expect(step, work, check_none))
        else:
            self._expect(step, work, check_none)

    def _receive(self, step: Step, comm: Communicator, src: int) -> None:
        def check(message: mpdist.Message) -> None:
            assert (message.src, message.tag) == (src, step.tag), step
            wanted = item(step, step.src) if step.kind == "object" else values(step, step.src, step.size)
            got = message.data if step.kind == "object" else message.data[: message.count]
            check_equal(got, wanted, step)

        def post() -> None:
            match step.kind:
                case "object":
                    work: Awaitable[mpdist.Message] = comm.recv_object(src, step.tag)
                case "probe":
                    work = probe_and_receive(comm, src, step.tag)
                case "interrupted":
                    work = receive_with_interruptions(comm, src, step, self._chance, self._there)
                case _:
                    full = np.full(step.size + step.number % 3, 9, step.dtype)
                    room = self._there(full) if step.is_into else None
                    work = comm.recv(room, src, step.tag)
            self._expect(step, work, check)

        if step.kind == "late":
            self._at_the_end.append(post)
        else:
            post()

    def _all_to_one(self, step: Step, comm: Communicator) -> None:
        """Every member sends to the root, which receives from any source."""
        part = step.part_of(self._me)
        assert part is not None
        root = step.root % comm.size
        self._expect(step, comm.send(self._there(values(step, self._me, step.size)), root, step.tag), check_none)
        if comm.rank != root:
            return

        def check(messages: list[mpdist.Message]) -> None:
            assert sorted(message.src for message in messages) == list(range(comm.size)), step
            for message in messages:
                check_equal(message.data, values(step, part[message.src], step.size), step)

        self._expect(step, asyncio.gather(*(comm.recv(tag=step.tag) for _ in range(comm.size))), check)

    def _around_the_ring(self, step: Step, comm: Communicator) -> None:
        part = step.part_of(self._me)
        assert part is not None
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        room = self._there(np.full(step.size, 9, step.dtype)) if step.is_into else None
        work = comm.sendrecv(self._there(values(step, self._me, step.size)), after, room, before, step.tag)
        self._expect(step, work, lambda message: check_equal(message.data, values(step, part[before], step.size), step))

    def _cancel_some(self) -> None:
        for work in self._chance.sample(self._unmet, len(self._unmet) // 2):
            self._unmet.remove(work)
            assert work.cancel(), work

    # ------------------------------------------------------------------ collectives

    def _post_collective(self, step: Step) -> mpdist.Work[Any]:
        comm = self._comms[step.comm]
        part = step.part_of(self._me)
        assert part is not None
        me, size, root = self._me, comm.size, step.root % comm.size
        at_root = comm.rank == root

        is_there = self._gpu is not None and self._chance.random() < 0.5

        def placed(array: np.ndarray[Any, Any]) -> Any:
            """The array, where this step has it."""
            if is_there and self._gpu is not None:
                return self._gpu.array(array)
            if not step.is_resident >> me & 1:
                return array
            resident = comm.empty(array.shape, array.dtype)
            resident[...] = array
            return resident

        given = values(step, me, step.size)
        x = placed(given)
        wide = placed(values(step, me, step.size * size))
        into = placed(np.empty_like(given)) if step.is_into else None

        def uneven(dst: int) -> Any:
            return placed(values(step, me, block_size(step, me, dst), dst))

        match step.kind:
            case "barrier":
                return comm.barrier()
            case "broadcast":
                return comm.broadcast(x, root)
            case "all_reduce" | "half":
                return comm.all_reduce(x, out=into)
            case "deterministic":
                return comm.all_reduce(x, out=into, deterministic=True)
            case "avg":
                return comm.all_reduce(placed(given.real.astype(np.float64)), "avg")
            case "function":
                return comm.all_reduce(x, fold)
            case "reduce":
                return comm.reduce(placed(given.real.copy()), root, "max")
            case "scan":
                return comm.scan(x)
            case "exscan":
                return comm.exscan(x)
            case "reduce_scatter":
                return comm.reduce_scatter(wide, out=into)
            case "gather":
                return comm.gather(x, root)
            case "all_gather":
                return comm.all_gather(x)
            case "scatter":
                return comm.scatter(wide if at_root else None, root)
            case "all_to_all":
                return comm.all_to_all(wide)
            case "uneven gather":
                return comm.gather([uneven(part[root])], root)
            case "uneven all_gather":
                return comm.all_gather([uneven(0)])
            case "uneven scatter":
                return comm.scatter([uneven(member) for member in part] if at_root else None, root)
            case "uneven all_to_all":
                return comm.all_to_all([uneven(member) for member in part])
            case "broadcast_object":
                return comm.broadcast_object(item(step, me) if at_root else None, root)
            case "gather_object":
                return comm.gather_object(item(step, me), root)
            case "all_gather_object":
                return comm.all_gather_object(item(step, me))
            case "scatter_object":
                return comm.scatter_object([item(step, me, member) for member in part] if at_root else None, root)
            case "all_to_all_object":
                return comm.all_to_all_object([item(step, me, member) for member in part])
        raise AssertionError(step.kind)


def probe_and_receive(comm: Communicator, src: int, tag: int) -> Awaitable[mpdist.Message]:
    """Probe at once, receive when it has come."""
    probed = comm.probe(src, tag)

    async def receive() -> mpdist.Message:
        return await (await probed).recv()

    return asyncio.ensure_future(receive())


def receive_with_interruptions(
    comm: Communicator, src: int, step: Step, chance: random.Random, there: Callable[[Any], Any]
) -> Awaitable[mpdist.Message]:
    """A receive that is cancelled now and then, and posted anew."""

    async def receive() -> mpdist.Message:
        for patience in range(chance.randrange(4)):
            room = there(np.full(step.size, 9, step.dtype)) if step.is_into else None
            task = asyncio.ensure_future(comm.recv(room, src, step.tag))
            for _ in range(patience + 1):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                return task.result()
        return await comm.recv(src=src, tag=step.tag)

    return asyncio.ensure_future(receive())


def check_equal(got: Any, wanted: Any, step: Step) -> None:
    """Raise unless equal; an array may have other axes than the reference."""
    got = [at_home(each) for each in got] if isinstance(got, list) else at_home(got)
    if isinstance(got, np.ndarray) and wanted is not None:
        got, wanted = got.reshape(-1), np.asarray(wanted).reshape(-1)
    np.testing.assert_equal(got, wanted, err_msg=f"in {step}")


def at_home(x: Any) -> Any:
    """What an array of the GPU holds now."""
    return x.get() if hasattr(x, "__cuda_array_interface__") else x


def check_none(result: object) -> None:
    assert result is None
