"""Lines: the user's program is told apart from libraries and from mpdist."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import pytest

from mpdist.debug.lines import caller, describe, outward, short


def own_frame() -> FrameType:
    return sys._getframe()


def test_the_callers_line_is_that_outside_mpdist() -> None:
    here = caller()
    assert here.rpartition(":")[0] == short(__file__)
    assert int(here.rpartition(":")[2]) == test_the_callers_line_is_that_outside_mpdist.__code__.co_firstlineno + 1


def test_a_frame_is_described_by_its_line_and_function() -> None:
    frame = own_frame()
    assert describe([frame]) == f"{short(__file__)}:{frame.f_lineno} in own_frame: return sys._getframe()"


def test_the_innermost_of_the_users_frames_stands_for_a_stack() -> None:
    library = next(frame for frame in outward(sys._getframe()) if "site-packages" in frame.f_code.co_filename)
    assert describe([library, own_frame(), sys._getframe()]).endswith("in own_frame: return sys._getframe()")
    assert library.f_code.co_name in describe([library])
    assert describe([]) == "nowhere"


def test_paths_in_the_working_folder_are_short() -> None:
    assert short(os.path.join(os.getcwd(), "train.py:3")) == "train.py:3"
    assert short("/elsewhere/train.py:3") == "/elsewhere/train.py:3"


def test_a_working_folder_that_is_gone_shortens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert short("/elsewhere/train.py:3") == "/elsewhere/train.py:3"
