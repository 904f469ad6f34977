"""What a signal's handler raises in the midst of averaging: whoever asks again goes on, and the ranks stay together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mpdist
from mpdist import Communicator, GradientAverager

pytestmark = pytest.mark.ranks(1, 2, 3)


class InterruptedArray(np.ndarray):
    """Ctrl-C comes while the averager looks at it again."""

    comes = False

    @property
    def flags(self) -> object:
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt
        return super().flags


def test_an_interrupted_end_of_a_step_goes_on_when_asked_again(comm: Communicator) -> None:
    """As in a notebook: it was interrupted for ever, and the other ranks waited in the next step."""
    x = np.zeros(5).view(InterruptedArray)
    averager = GradientAverager(comm, [np.zeros(3), x])
    averager.wait()
    for _ in range(3):
        x[:] = comm.rank
        averager.ready(0)
        averager.ready(1)
        x.comes = comm.rank == 0
        if x.comes:
            with pytest.raises(KeyboardInterrupt):
                averager.wait()
        averager.wait()
        assert (x == (comm.size - 1) / 2).all()


def interrupted(number: int, end: Callable[[], object]) -> bool:
    """End a step; Ctrl-C comes at the call of so many functions of the package, and the end is asked for again."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("mpdist.gradients"):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        end()
    except KeyboardInterrupt:
        end()
        return True
    finally:
        sys.settrace(before)
    return False


def ends_of(comm: Communicator, call: str, x: np.ndarray) -> Callable[[], object]:
    """How a step of it is ended, any number of times."""
    arrays = [np.zeros(3), x, np.zeros(2, np.float32)]
    if call == "average":
        return mpdist.average(comm, arrays).wait
    averager = GradientAverager(comm, arrays, bucket_bytes=30)
    if call == "a later step":
        averager.wait()
    return averager.wait


@pytest.mark.parametrize("call", ["average", "the first step", "a later step"])
def test_the_end_of_a_step_goes_on_wherever_it_was_interrupted(comm: Communicator, call: str) -> None:
    """In the first step each later wait raised the same again, and the other ranks waited."""
    x = np.zeros(5)
    number, goes_on = 0, True
    while goes_on:
        end = ends_of(comm, call, x)
        x[:] = comm.rank + number
        if comm.rank == 0:
            goes_on = interrupted(number, end)
        else:
            end()
        np.testing.assert_allclose(x, (comm.size - 1) / 2 + number)
        goes_on = comm.broadcast_object(goes_on, 0).wait()
        number += 1
    assert number > 50
