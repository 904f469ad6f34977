"""Lines: which line of the user's program a frame stands for, as texts have it."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

import mpdist

_OURS = os.path.dirname(os.path.abspath(mpdist.__file__)) + os.sep
_LIBRARIES = (
    _OURS,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


def short(site: str) -> str:
    """A path, with or without a line, relative to the working folder if it lies in it."""
    here = os.getcwd() + os.sep
    return site.removeprefix(here)


def caller() -> str:
    """`train.py:88`: the line outside mpdist that has led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Whether it is neither of mpdist, nor of Python's library, nor of an installed package."""
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def describe(frames: Iterable[FrameType]) -> str:
    """`train.py:36 in load_batch: time.sleep(60)`; the innermost of the user's frames, or else of all.

    Args:
        frames: innermost first.
    """
    first = None
    for frame in frames:
        first = first or frame
        if is_users(frame):
            first = frame
            break
    if first is None:
        return "nowhere"
    code, line = first.f_code, first.f_lineno
    source = linecache.getline(code.co_filename, line).strip()
    return f"{short(code.co_filename)}:{line} in {code.co_name}{source and ': ' + source}"
