"""Compiling: torch.compile leaves what communicates alone.

Dynamo would look into our methods, both when it traces a caller and when it runs one after a graph break, and find
objects that it does not know. Marked before Dynamo is loaded, for loading it takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_REASON = "mpdist communicates"


def leave_alone(function: F) -> F:
    """Let a function, and all that it calls, run as plain Python."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    elif hasattr(frames, "skip_code"):
        function = _without_dynamo(function, frames)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return function


def _without_dynamo(function: F, frames: Any) -> F:
    """For older versions, which skip a function, but not what it calls."""

    def called(*args: Any, **kwargs: Any) -> Any:
        callback = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(callback)

    frames.skip_code(called.__code__)
    return cast(F, functools.update_wrapper(called, function))
