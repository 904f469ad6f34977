"""Compiling: torch.compile leaves what communicates alone.

Dynamo would look into our methods, both when it traces a caller and when it runs one after a graph break, and find
objects that it does not know. Marked before Dynamo is loaded, for loading it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_REASON = "mpdist communicates"


def leave_alone(function: F) -> F:
    """Let a function, and all that it calls, run as plain Python."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _skip(marked.__code__)
    return function


def _skip(code: CodeType) -> None:
    dynamo: Any = getattr(torch._C, "_dynamo", None)
    frames: Any = getattr(dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    elif hasattr(frames, "skip_code"):
        frames.skip_code(code)
