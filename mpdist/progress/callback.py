"""Callbacks of finished Works: one that raises is reported, and disturbs nobody.

It runs on whatever thread noticed the end, inside somebody else's await or
`wait()`, who must not get its error. What a signal's handler raises meanwhile is
not its own: whoever waits gets that.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpdist.progress.interruption import is_of_handler
from mpdist.progress.thread import is_progress_thread

if TYPE_CHECKING:
    from mpdist.progress.work import Work


def call_back(fn: Callable[[Work[Any]], object], work: Work[Any]) -> None:
    """Call `fn(work)`, and report what it raises as asyncio does for its own callbacks.

    SystemExit and KeyboardInterrupt pass, as they do in asyncio, and what a signal's handler has raised; not on the
    progress thread, which they would end.
    """
    try:
        fn(work)
    except BaseException as error:
        if (isinstance(error, SystemExit) or is_of_handler(error)) and not is_progress_thread():
            raise
        _report(f"mpdist: callback {fn!r} of {work.describe()} raised", error)


def _report(text: str, error: BaseException) -> None:
    """To the running loop's exception handler; to stderr where no loop runs."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        loop.call_exception_handler({"message": text, "exception": error})
        return
    print(f"{text}:\n{''.join(traceback.format_exception(error))}", end="", file=sys.stderr)


def when_done(work: Work[Any], call: Callable[[Any], object]) -> None:
    """Call `call(work)` on the thread that finds it done, whether or not an event loop runs here; at once if it is."""
    engine = work._channel.engine
    with engine.lock:
        if work._callbacks is None:
            work._callbacks = []
        work._callbacks.append((call, None, None))
        if work._done:
            engine.finished.append(work)
    if work._done:
        engine.flush()
