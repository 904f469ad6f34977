"""Interruption: whoever waits gets what a signal's handler raises, and the operation goes on."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import pytest
from progress import interruptions

import mpdist
from mpdist import Communicator

pytestmark = pytest.mark.ranks(1)

INTERRUPTIONS = [KeyboardInterrupt, TimeoutError]


@pytest.fixture(params=INTERRUPTIONS)
def interruption(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """A signal's handler raises it: SIGUSR2."""
    kind: type[BaseException] = request.param

    def handle(number: int, frame: FrameType | None) -> None:
        raise kind("on purpose")

    before = signal.signal(signal.SIGUSR2, handle)
    yield kind
    signal.signal(signal.SIGUSR2, before)


class Interrupted:
    """A request that is pending at the first look; the next are interrupted by the signal, and then it is complete."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.is_new = True

    def Test(self) -> bool:
        if self.is_new:
            self.is_new = False
            return False
        if self.looks:
            self.looks -= 1
            signal.raise_signal(signal.SIGUSR2)
        return True


Post = Callable[[Communicator, int], "mpdist.Work[str]"]


def one_request(comm: Communicator, looks: int) -> mpdist.Work[str]:
    return comm._channel.post_direct("one request", (str,), "result", Interrupted, looks)


def one_program(comm: Communicator, looks: int) -> mpdist.Work[str]:
    def program(_: object) -> Generator[Interrupted, None, str]:
        yield Interrupted(looks)
        yield Interrupted(0)
        return "result"

    return comm._channel.post("one program", program, str)


posts = pytest.mark.parametrize("post", [one_request, one_program])


@posts
def test_an_interrupted_wait_may_be_repeated(comm: Communicator, interruption: type[BaseException], post: Post) -> None:
    work = post(comm, 3)
    while not work._done:
        try:
            work.wait()
        except interruption:
            assert not work._done
            assert work in comm._channel.engine.active
    assert work.wait() == "result"


def test_an_interruption_of_a_callback_reaches_whoever_waits(
    comm: Communicator, interruption: type[BaseException]
) -> None:
    work = one_request(comm, 0)
    called: list[mpdist.Work[str]] = []
    work.add_done_callback(lambda _: signal.raise_signal(signal.SIGUSR2))
    work.add_done_callback(called.append)
    with pytest.raises(interruption, match="on purpose"):
        work.wait()
    assert work.wait() == "result"
    comm._channel.engine.look()
    assert called == [work]


@posts
def test_an_interrupted_await_may_be_repeated(
    comm: Communicator, interruption: type[BaseException], post: Post
) -> None:
    async def main() -> str:
        work = post(comm, 3)
        while not work._done:
            try:
                await work
            except interruption:
                assert not work._done
        return await work

    assert asyncio.run(main()) == "result"


@posts
def test_an_interrupted_turn_of_the_loop_is_followed_by_others(
    comm: Communicator, interruption: type[BaseException], post: Post
) -> None:
    """An Exception goes to the loop's exception handler; a KeyboardInterrupt ends the run, and another may follow."""
    contexts: list[dict[str, Any]] = []
    works: list[mpdist.Work[str]] = []

    async def start() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        works.append(post(comm, 2))

    async def go_on() -> None:
        is_done = asyncio.Event()
        works[0].add_done_callback(lambda _: is_done.set())
        async with asyncio.timeout(20):
            await is_done.wait()

    with asyncio.Runner() as runner:
        for main in (start, go_on, go_on, go_on):
            try:
                runner.run(main())
            except KeyboardInterrupt:
                contexts.append({})
    assert works[0].result() == "result"
    assert len(contexts) == 2


def test_a_program_that_was_interrupted_itself_fails(comm: Communicator) -> None:
    """It cannot go on: that is told, and not taken for its end."""

    def program(_: object) -> Generator[Interrupted, None, None]:
        yield Interrupted(0)
        raise KeyboardInterrupt

    part = comm.dup().wait()
    work: mpdist.Work[None] = part._channel.post("program", program, str)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert isinstance(work.exception(), mpdist.CommunicationError)
    with pytest.raises(mpdist.ClosedError, match="was interrupted"):
        part.barrier()


def test_an_interrupted_callback_leaves_the_others_to_be_called(comm: Communicator) -> None:
    calls: list[object] = []

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    work = one_request(comm, 0)
    work.add_done_callback(interrupted)
    work.add_done_callback(calls.append)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    comm.barrier().wait()
    comm._channel.engine.drive()
    assert calls == [work]


def test_nobody_keeps_a_lock_wherever_a_look_is_interrupted(comm: Communicator) -> None:
    """Neither who asks whether something is done, nor who waits."""
    engine = comm._channel.engine
    with interruptions.raising():
        for number in itertools.count(1):
            receive = comm.recv(src=0)
            place = interruptions.Interruptions(number, "progress", ("engine", "work"))
            engine._looked = 0.0
            try:
                with place:
                    assert not receive.done()
                    with pytest.raises(mpdist.WorkTimeout):
                        receive.wait(0.001)
            except interruptions.Interrupted:
                assert not engine.lock._is_owned(), f"interrupted at place {number}"  # type: ignore[attr-defined]
            receive.cancel()
            if place.left >= 0:
                break
    assert number > 20
