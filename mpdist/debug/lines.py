"""Lines: which line of the user's program a frame stands for, as texts have it."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_LIBRARY = (_OURS, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), "<frozen")


def short(site: str) -> str:
    """A path, with or without a line, relative to the working folder if it lies in it."""
    try:
        return site.removeprefix(os.getcwd() + os.sep)
    except OSError:  # it was removed
        return site


def is_ours(site: str) -> bool:
    """Whether a path, with or without a line, is one of mpdist's own."""
    return site.startswith(_OURS)


def caller() -> str:
    """`train.py:88`: the line outside mpdist that has led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _distance(frame: FrameType) -> int:
    """Of one frame, see `distance`; 2: mpdist and Python's library."""
    path = frame.f_code.co_filename
    if is_ours(path):
        return 2
    if path.startswith(_INSTALLED):
        return 1
    return 2 if path.startswith(_LIBRARY) else 0


def distance(frames: Iterable[FrameType]) -> int:
    """How far the nearest of the frames is from the user's own program: 0 in it, 1 an installed package, 2 beyond."""
    return min(map(_distance, frames), default=2)


def is_users(frames: Iterable[FrameType]) -> bool:
    """Whether one of the frames is of the user's program, or of a package that it uses."""
    return distance(frames) < 2


def describe(frames: Iterable[FrameType]) -> str:
    """`train.py:36 in load_batch: time.sleep(60)`: the innermost of the frames nearest to the user's own program.

    Args:
        frames: innermost first.
    """
    nearest = min(frames, key=_distance, default=None)
    if nearest is None:
        return "nowhere"
    code, line = nearest.f_code, nearest.f_lineno
    source = linecache.getline(code.co_filename, line).strip()
    return f"{short(code.co_filename)}:{line} in {code.co_name}{source and ': ' + source}"
