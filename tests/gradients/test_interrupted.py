"""What a signal's handler raises in the midst of averaging: whoever asks again goes on, and the ranks stay together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from progress.interruptions import Interrupted, Interruptions, Pending, raising

import mpdist
from mpdist import Communicator, GradientAverager

pytestmark = pytest.mark.ranks(1, 2, 3)

FILES = "agreement", "average", "averager", "bucket", "buckets", "packing", "talk", "tree"


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
    """End a step, interrupted at the place of this number, and ask for the end again; whether there is such a place."""
    try:
        with raising(), Interruptions(number, "gradients", FILES):
            end()
    except Interrupted:
        end()
        return True
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


@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
def test_what_the_first_step_has_just_posted_is_not_posted_again(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Its Work was lost where the handler came between the call and what keeps it."""
    x = np.full(5, float(comm.rank))
    averager = GradientAverager(comm, [x])
    post, pending = getattr(Communicator, op), Pending()

    def posted(*arguments: Any, **options: Any) -> Any:
        work = post(*arguments, **options)
        pending.come  # noqa: B018  # which sends
        return work

    if comm.rank == 0:
        with raising(), monkeypatch.context() as patch:
            patch.setattr(Communicator, op, posted)
            with pytest.raises(Interrupted):
                averager.wait()
    averager.wait()
    np.testing.assert_allclose(x, (comm.size - 1) / 2)
