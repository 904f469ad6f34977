"""Talk: several wait for one conversation, in one thread and in two."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mpdist import Communicator
from mpdist.gradients.talk import Conversation, Talk

pytestmark = pytest.mark.ranks(1, 2, 3)


async def test_two_who_await_one_step_get_its_result(comm: Communicator) -> None:
    """The one that is woken last does not answer for a message that is not done yet."""

    def sums() -> Talk[str]:
        for number in range(20):
            x = np.full(50_000, comm.rank + number)
            got = yield comm.all_reduce(x)
            assert got is x
            assert got[-1] == comm.size * (comm.size - 1) / 2 + comm.size * number
        return "all"

    conversation = Conversation(sums)

    async def hold() -> str:
        return await conversation

    assert await asyncio.gather(hold(), hold()) == ["all", "all"]


def test_two_threads_that_wait_for_one_step_get_its_result(comm: Communicator) -> None:
    """Each step is taken by one of them: a generator runs once at a time, and the ranks post the same."""

    class Slow(np.ndarray):
        """Lets other threads run in the midst of a step."""

        @property
        def flags(self) -> Any:
            time.sleep(0)
            return super().flags

    def sums() -> Talk[int]:
        total = 0
        for number in range(30):
            x = np.full(3, comm.rank + number).view(Slow)
            yield comm.all_reduce(x)
            total += int(x[-1])
        return total

    for _ in range(10):
        conversation = Conversation(sums)
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(conversation.wait) for _ in range(2)]
        total = 30 * comm.size * (comm.size - 1) // 2 + comm.size * sum(range(30))
        assert [wait.result() for wait in waits] == [total, total]
