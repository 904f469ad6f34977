"""Quiet: a call of NumPy without warnings of overflow and the like, at a tenth of what `np.errstate` costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeAlias

import numpy as np

# Since then what warns belongs to the context, not to the thread, and no Python is needed around the call.
IS_ONE_CALL = int(np.__version__.split(".", 1)[0]) >= 2

Call: TypeAlias = tuple[Any, ...]
"""A function that runs no Python, and its arguments, as `QUIET.call` takes them.

A signal's handler that raises comes before it or after it. Ufuncs are such functions, partials of them and
`operator.setitem`; `np.copyto` and others of NumPy's are not, for they dispatch in Python.
"""


class _Quiet(threading.local):
    """Of each thread, for only one may be in a context at a time.

    Attributes:
        call: calls a function that runs no Python, with arguments.
    """

    def __init__(self) -> None:
        self.call: Callable[..., Any] = _call_in_errstate
        if IS_ONE_CALL:
            context = Context()
            context.run(np.seterr, all="ignore")
            self.call = context.run


def _call_in_errstate(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments, **options)


QUIET = _Quiet()
