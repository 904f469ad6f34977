"""Compiling: torch.compile leaves what communicates alone.

Dynamo would look into our methods, both when it traces a caller and when it runs one after a graph break, and find
objects that it does not know. Marked before Dynamo is loaded, for loading it takes seconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_REASON = "mpdist communicates"


def leave_alone(function: F) -> F:
    """Let a function, and all that it calls, run as plain Python."""
    frames = _frames()
    if hasattr(frames, "set_code_exec_strategy"):
        _skip(frames, function, frames._FrameAction.SKIP)
    elif hasattr(frames, "skip_code"):
        function = _without_dynamo(function, frames)
    return _marked(function)


def leave_alone_itself(function: F) -> F:
    """Let a function run as plain Python, but not what it calls, as a wrapped module's forward."""
    frames = _frames()
    if hasattr(frames, "set_code_exec_strategy"):
        _skip(frames, function, frames._FrameAction.DEFAULT)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)
    return _marked(function)


def is_backward_compiled() -> bool:
    """Whether compiled autograd runs a backward: its hooks are called, what is queued for its end is dropped."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def is_tracing_calls() -> bool:
    """Whether Dynamo looks into what this thread calls."""
    callback = getattr(_frames(), "get_eval_frame_callback", None)
    return callback is not None and callback() is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module, and so of all in it, go to what torch.compile has made."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _frames() -> Any:
    """What says, without Dynamo, which code it is to look into."""
    return getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def _skip(frames: Any, function: F, for_callees: Any) -> None:
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, for_callees))


def _marked(function: F) -> F:
    """Where Dynamo traces a caller, its graph ends before the call."""
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
