"""bench/ddp.py: ratios of differences, which may be near zero."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
with pytest.MonkeyPatch.context() as patch:  # else its memory.py is taken for the folder of tests
    patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    import ddp  # beside the other benchmarks
    import measure


def compared(theirs: list[float]) -> Any:
    return ddp.compare("exposed", "MPICH", np.array([1.0, 2.0, 3.0] * 5), np.array(theirs * 5), 0.25)


def test_time_that_may_be_nothing_gives_no_ratio_and_no_verdict() -> None:
    assert compared([8.0, 9.0, 10.0]).ratio == pytest.approx(2 / 9)
    found = [compared(theirs) for theirs in ([-8.0, -9.0, -10.0], [-9.0, 1.0, 10.0])]
    assert [each.ratio for each in found] == [None, None]
    stream = io.StringIO()
    measure.show(found, stream)
    assert "met" not in stream.getvalue()
    assert "missed" not in stream.getvalue()


def test_launch_without_a_ratio_is_the_worst() -> None:
    clear, unclear = compared([8.0, 9.0, 10.0]), compared([-1.0, -1.0, -1.0])
    assert ddp.worst([[clear], [unclear]]) == [unclear]
