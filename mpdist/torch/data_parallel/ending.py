"""Ending: what is called when a backward ends, or breaks off.

torch's engine runs queued callbacks at the end of the graph task in which they
were queued. The one of the module's outputs is the outermost: reentrant
checkpointing runs inner ones, whose callbacks come early. A backward that an
exception ends drops its callbacks without calling them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from mpdist.torch.compiling import leave_alone

NO_TASK = -1

_engine: Any = torch.autograd.Variable._execution_engine


class Ending:
    """Calls one of two functions, once."""

    @leave_alone
    def __init__(self, ended: Callable[[], object], broke_off: Callable[[], object]) -> None:
        self._ended = ended
        self._broke_off: Callable[[], object] | None = broke_off

    @leave_alone
    def __call__(self) -> None:
        self._broke_off = None
        self._ended()

    @leave_alone
    def __del__(self) -> None:
        if self._broke_off is not None:
            self._broke_off()


def at_end_of_backward(ended: Callable[[], object], broke_off: Callable[[], object]) -> None:
    """Call `ended()` when the graph task that runs in this thread is over, `broke_off()` if it never ends."""
    _engine.queue_callback(Ending(ended, broke_off))


def current_task() -> int:
    """Which graph task runs in this thread, as torch counts them; NO_TASK outside of all."""
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Whether this thread runs a graph task."""
    return current_task() != NO_TASK


def is_whole_backward() -> bool:
    """Whether the graph task in this thread runs all of its graph; autograd.grad() and backward(inputs=...) do not."""
    return bool(_engine.is_checkpoint_valid())  # reentrant checkpoints need the same


def is_in_reentrant_checkpoint() -> bool:
    """Whether the graph task in this thread is one within another."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False
