"""Jobs with arrays on a GPU: a rank that is lost ends the job, whatever the others wait for there."""

from __future__ import annotations

import pytest
from runtime.programs import SCRIPTS, report, run

SCRIPT = str(SCRIPTS / "on_device.py")

pytestmark = [pytest.mark.job, pytest.mark.any_mpi, pytest.mark.limit(60)]


@pytest.mark.parametrize("way", ["led", "slots", "message"])
@pytest.mark.parametrize("how", ["exception", "sigkill", "sigsegv"])
@pytest.mark.parametrize("gpu", ["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def test_a_rank_that_is_lost_on_the_way_ends_the_job(gpu: str, how: str, way: str) -> None:
    ended = run("mpdist", 2, SCRIPT, gpu, how, way)
    assert ended.status != 0
    assert report(ended).startswith("mpdist: rank 1 of 2 (host ")
    assert "boom" in report(ended) if how == "exception" else how.upper() in ended.err
