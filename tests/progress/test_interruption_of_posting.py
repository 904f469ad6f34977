"""What a signal's handler interrupts while it is posted: a message is whole, and no other receive or sum suffers.

Each place is tried in turn, in each file that has to do with posting, see `interruptions`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from progress.interruptions import Interrupted, Interruptions, Pending, raising

from mpdist import ClosedError, Communicator
from mpdist.algorithms.shared.few import FewPlan
from mpdist.algorithms.shared.short import ShortPlan
from mpdist.algorithms.shared.small import SmallPlan
from mpdist.progress import wire
from mpdist.progress.channel import Channel

pytestmark = pytest.mark.ranks(2)

FILES = {
    "progress": (
        "array_receive",
        "channel",
        "collective",
        "engine",
        "inbox",
        "mailbox",
        "message",
        "receive",
        "roll",
        "sending",
        "sendrecv",
    ),
    "shared": ("few", "few_works", "members"),
    "comm": ("all_reduce", "groups", "objects", "operation", "point_to_point"),
    "transport": ("mpi", "requests"),
}
GO = 9
WAIT = 2.0


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    with raising():
        yield


def interrupted(number: int, folder: str, call: Callable[[], Any]) -> tuple[Any, bool]:
    """What the call gives, None if it was interrupted at that place; and whether there is such a place."""
    interruptions = Interruptions(number, folder, FILES[folder])
    try:
        with interruptions:
            return call(), interruptions.left < 0
    except Interrupted:
        return None, True


def go_on(comm: Communicator, is_on: bool) -> bool:
    """Whether rank 1 goes on, for both ranks."""
    if comm.rank == 1:
        comm.send(np.full(1, int(is_on)), 0, GO).wait()
        return is_on
    return bool(comm.recv(np.zeros(1, int), 1, GO).wait().data[0])


def numbers(value: int) -> np.ndarray[Any, Any]:
    return np.full(3, value)


def send_to_receives(comm: Communicator, others: int) -> None:
    """Rank 0: a message for each receive of rank 1, as long as that goes on."""
    is_on = True
    while is_on:
        for tag in (*range(3, 3 + others), 2):
            comm.send(numbers(tag), 1, tag).wait()
        is_on = go_on(comm, True)


RECEIVES: dict[str, Callable[[Communicator], Any]] = {
    "array": lambda comm: comm.recv(np.zeros(3, int), 0, 2),
    "new array": lambda comm: comm.recv(None, 0, 2),
    "probe": lambda comm: comm.probe(0, 2),
}


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("case", RECEIVES)
def test_receives_that_wait_already_still_get_their_messages(comm: Communicator, case: str, others: int) -> None:
    if comm.rank == 0:
        send_to_receives(comm, others)
        return
    for number in itertools.count():
        waiting = [comm.recv(np.zeros(3, int), 0, tag) for tag in range(3, 3 + others)]
        work, is_on = interrupted(number, "progress", lambda: RECEIVES[case](comm))
        work = work or comm.recv(np.zeros(3, int), 0, 2)
        messages = [each.wait(WAIT) for each in (*waiting, work)]
        got = [(each.recv().wait() if case == "probe" and each.data is None else each).data[0] for each in messages]
        assert got == [*range(3, 3 + others), 2], f"interrupted at place {number}"
        assert comm._channel.inbox.box.receives == 0
        if not go_on(comm, is_on):
            return


@pytest.mark.parametrize("others", [0, 1])
def test_a_receive_is_cancelled_or_waits_on(comm: Communicator, others: int) -> None:
    if comm.rank == 0:
        send_to_receives(comm, others)
        return
    for number in itertools.count():
        waiting = [comm.recv(np.zeros(3, int), 0, tag) for tag in range(3, 3 + others)]
        work = comm.recv(np.zeros(3, int), 0, 2)
        _, is_on = interrupted(number, "progress", work.cancel)
        if work.cancelled():
            work = comm.recv(np.zeros(3, int), 0, 2)
        got = [each.wait(WAIT).data[0] for each in (*waiting, work)]
        assert got == [*range(3, 3 + others), 2], f"interrupted at place {number}"
        assert comm._channel.inbox.box.receives == 0
        if not go_on(comm, is_on):
            return


SENDS: dict[str, Callable[[Communicator, Any], Any]] = {
    "array": lambda comm, x: comm.send(x, 1, 1),
    "in pieces": lambda comm, x: comm.send(x, 1, 1),
    "object": lambda comm, x: comm.send_object([x], 1, 1),
}


@pytest.mark.parametrize("folder", ["comm", "progress"])
@pytest.mark.parametrize("case", SENDS)
def test_a_message_arrives_whole_or_not_at_all(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, case: str, folder: str
) -> None:
    """Whoever was interrupted gives its array away, and other messages of the tag follow."""
    count = 200_000
    if case == "in pieces":
        monkeypatch.setattr(wire, "PIECE_BYTES", 500_000)
    for number in itertools.count():
        if comm.rank == 0:
            x = np.full(count, 2 * number)
            work, is_on = interrupted(number, folder, lambda x=x: SENDS[case](comm, x))
            comm.send(np.array([work is None]), 1, 2).wait()
            del x
            gc.collect()
            others = [np.full(count, -1) for _ in range(4)]
            last = SENDS[case](comm, np.full(count, 2 * number + 1))
            comm.recv(np.zeros(1), 1, 3).wait()
            last.wait()
            assert work is None or work.done()
            assert len(others) == 4
            comm.send(np.full(1, int(is_on)), 1, GO).wait()
        else:
            was_interrupted = comm.recv(np.zeros(1, bool), 0, 2).wait().data[0]
            got = []
            while not got or got[-1] % 2 == 0:
                data = (comm.recv_object(0, 1) if case == "object" else comm.recv(None, 0, 1)).wait(10).data
                values = np.unique(data[0] if case == "object" else data)
                assert len(values) == 1, f"interrupted at place {number}"
                got.append(int(values[0]))
            assert got == [2 * number, 2 * number + 1] or (was_interrupted and got == [2 * number + 1])
            comm.send(np.zeros(1), 0, 3).wait()
            is_on = bool(comm.recv(np.zeros(1, int), 0, GO).wait().data[0])
        if not is_on:
            return


@pytest.mark.parametrize("folder", ["comm", "progress"])
def test_a_sendrecv_leaves_no_receive_behind(comm: Communicator, folder: str) -> None:
    for number in itertools.count():
        if comm.rank == 0:
            comm.send(numbers(1), 1, 2).wait()
            if not go_on(comm, True):
                return
            continue
        work, is_on = interrupted(number, folder, lambda: comm.sendrecv(numbers(5), 1, src=0, tag=2))
        message = (work or comm.recv(None, 0, 2)).wait(WAIT)
        assert message.data.tolist() == [1, 1, 1], f"interrupted at place {number}"
        comm.send(numbers(6), 1, 3).wait()
        while comm.probe(1).wait().recv().wait().tag != 3:  # what it has sent to itself
            pass
        if not go_on(comm, is_on):
            return


class _OutOfStep(Exception):
    """Rank 1 has heard so."""


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce at once": lambda comm, x: comm.all_reduce(x),
    "all_reduce that waits": lambda comm, x: comm.all_reduce(x),
    "barrier": lambda comm, x: comm.barrier(),
    "all_gather": lambda comm, x: comm.all_gather(x, out=np.zeros((comm.size, *x.shape), x.dtype)),
}


# Of those that go at once, from the third on: whether rank 0 comes later than rank 1, which is interrupted.
LATE = {"all_reduce at once": False, "all_reduce that waits": True}
# So many places these have at least, in files of a folder.
LEAST = {
    ("all_reduce at once", "comm"): 5,
    ("all_reduce that waits", "comm"): 5,
    ("all_reduce that waits", "shared"): 5,
}


@pytest.mark.parametrize("folder", ["comm", "progress", "shared", "transport"])
@pytest.mark.parametrize("op", CALLS)
async def test_a_collective_was_not_posted_or_no_other_is(comm: Communicator, op: str, folder: str) -> None:
    """Whoever catches it calls again: all get what they should, or that rank hears that it is out of step."""
    for number in itertools.count():
        place = _Place(number, folder)
        with contextlib.suppress(_OutOfStep):
            async with comm.dup() as each:
                for _ in range(0 if op not in LATE else 2):
                    await each.all_reduce(np.zeros(4))
                for turn in range(3):
                    await _call(comm, each, op, turn, place)
        if not (await comm.broadcast(np.full(1, int(place.is_there)), 1))[0]:
            assert number > LEAST.get((op, folder), -1)
            return


class _Place:
    def __init__(self, number: int, folder: str) -> None:
        self.number, self.folder, self.is_there = number, folder, False


async def _call(comm: Communicator, each: Communicator, op: str, turn: int, place: _Place) -> None:
    x = np.full(4, 10.0**turn)
    work = None
    if comm.rank == 1:
        if turn == 0:
            work, place.is_there = interrupted(place.number, place.folder, lambda: CALLS[op](each, x))
        if work is None and each._channel.broken:
            with pytest.raises(ClosedError, match="a signal's handler has interrupted"):
                CALLS[op](each, x)
        else:
            work = work or CALLS[op](each, x)
        await comm.send(np.array([work is None]), 0, 4)
        is_out = work is None
    else:
        if not LATE.get(op):
            work = CALLS[op](each, x)
        is_out = (await comm.recv(np.zeros(1, bool), 1, 4)).data[0]
    if is_out:
        raise _OutOfStep
    if work is None:
        work = CALLS[op](each, x)
    result = await work
    if op != "barrier":
        assert np.sum(result) == comm.size * 4 * 10.0**turn, f"interrupted at place {place.number}"


@pytest.mark.parametrize(
    ("plan", "count", "op"), [(FewPlan, 2, "avg"), (SmallPlan, 2_000, "sum"), (ShortPlan, 20_000, "sum")]
)
def test_one_that_others_have_heard_of_is_not_posted_again(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, plan: Any, count: int, op: str
) -> None:
    """It went unnoticed: who caught it posted a second one, and all later sums were of different calls."""
    each = comm.dup().wait()
    for _ in range(3):  # the ranks share memory from the second on
        each.all_reduce(np.zeros(count), op).wait()
    each._channel.at_once = None  # of what goes at once rank 0 may make no request
    make, pending = plan.request, Pending()

    def made(*arguments: Any) -> Any:
        request = make(*arguments)
        pending.come  # noqa: B018  # which sends
        return request

    x = np.full(count, 1.0)
    if comm.rank == 1:
        with monkeypatch.context() as patch:
            patch.setattr(plan, "request", staticmethod(made))
            with pytest.raises(Interrupted):
                each.all_reduce(x, op)
        with pytest.raises(ClosedError, match="a signal's handler has interrupted all_reduce"):
            each.all_reduce(x, op)
    else:
        each.all_reduce(x, op).wait()
        assert (x == (1 if op == "avg" else comm.size)).all()
    comm.barrier().wait()
    each.close().wait()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no handler runs after a call of a function of Python")
def test_one_whose_work_was_not_handed_out_is_not_posted_again(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = comm.dup().wait()
    post, pending = Channel.post_direct, Pending()

    def posted(*arguments: Any, **options: Any) -> Any:
        work = post(*arguments, **options)
        pending.come  # noqa: B018  # which sends
        return work

    if comm.rank == 1:
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "post_direct", posted)
            with pytest.raises(Interrupted):
                each.all_gather(np.ones(3))
        with pytest.raises(ClosedError, match="a signal's handler has interrupted all_gather"):
            each.all_gather(np.ones(3))
    else:
        assert each.all_gather(np.ones(3)).wait().sum() == 3 * comm.size
    comm.barrier().wait()
    each.close().wait()
