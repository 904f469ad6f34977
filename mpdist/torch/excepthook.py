"""Excepthook: the traceback of a rank that fails gets out.

init_process_group puts a hook in front of ours that collects what is printed, to print it with the rank in front
when our hook has returned. Ours does not return: it ends the job. So it gets the true stderr back.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_is_installed = False


def install() -> None:
    """Put ours in front; done once, before torch's hook comes."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        sys.excepthook = _with_true_stderr(sys.excepthook)


def _with_true_stderr(hook: Hook) -> Hook:
    stderr = sys.stderr

    def called(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(sys.stderr, io.StringIO):
            sys.stderr = stderr
        hook(kind, error, trace)

    return called
