"""Whole jobs whose messages stay on the sender's device: ranks that end early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runtime.programs import run

pytestmark = [pytest.mark.job, pytest.mark.any_mpi, pytest.mark.limit(60)]

SCRIPT = str(Path(__file__).with_name("scripts") / "shown.py")


def test_a_message_for_a_finished_rank_ends_the_job() -> None:
    ended = run("mpdist", 2, SCRIPT, "leaves_before_a_receive")
    assert ended.status != 0
    assert re.search(
        r"rank 0 waits in send to 1, tag 0 on 'world' \(.*leaves_before_a_receive: await world.send\(.* "
        r"for rank 1, which has finished",
        ended.err,
    ), ended.err


def test_a_rank_whose_program_is_over_still_gives_what_it_has_sent() -> None:
    ended = run("mpdist", 2, SCRIPT, "sends_and_ends")
    assert ended.status == 0, ended.err
    assert "mpdist:" not in ended.err


def test_a_sender_that_dies_ends_the_job() -> None:
    ended = run("mpdist", 2, SCRIPT, "dies_while_it_sends")
    assert ended.status != 0
    assert "rank 0" in ended.err
