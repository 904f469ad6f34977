"""Which operations get a GPU's memory, from what the user, the library and a trial say."""

from __future__ import annotations

import pytest

from mpdist.config import DEVICE_OPERATIONS
from mpdist.transport.cuda_aware.table import REDUCTIONS, Answer, decide, needs_trial, text_of, to_try

TRIED = dict.fromkeys(DEVICE_OPERATIONS, Answer.OK) | {"gather": Answer.HANGS}


def taken(word: str, says: str, family: str) -> set[str]:
    return {op for op, answer in decide(word, says, family, TRIED).items() if answer is Answer.OK}


EVERY = set(DEVICE_OPERATIONS)


@pytest.mark.parametrize(
    ("word", "says", "family", "expected"),
    [
        ("auto", "no", "mpich", set()),
        ("auto", "unknown", "mpich", set()),
        ("auto", "yes", "mpich", EVERY - {"gather"}),
        ("auto", "yes", "openmpi", EVERY - {"gather", *REDUCTIONS}),
        ("probe", "no", "mpich", EVERY - {"gather"}),
        ("probe", "unknown", "openmpi", EVERY - {"gather", *REDUCTIONS}),
        ("no", "yes", "mpich", set()),
        ("yes", "no", "mpich", EVERY),
        ("yes", "unknown", "openmpi", EVERY - {*REDUCTIONS}),
        ("send,all_reduce", "no", "openmpi", {"send", "all_reduce"}),
    ],
)
def test_what_is_known_to_work_is_taken(word: str, says: str, family: str, expected: set[str]) -> None:
    assert taken(word, says, family) == expected
    assert set(decide(word, says, family, TRIED)) == EVERY


@pytest.mark.parametrize(("word", "says"), [("auto", "yes"), ("probe", "no"), ("probe", "yes"), ("probe", "unknown")])
def test_nothing_is_taken_before_the_trial(word: str, says: str) -> None:
    assert needs_trial(word, says)
    assert Answer.OK not in decide(word, says, "mpich", {}).values()


@pytest.mark.parametrize(
    ("word", "says"), [("auto", "no"), ("auto", "unknown"), ("no", "yes"), ("yes", "no"), ("send", "yes")]
)
def test_no_trial_is_made_where_it_decides_nothing(word: str, says: str) -> None:
    assert not needs_trial(word, says)
    assert decide(word, says, "mpich", {}) == decide(word, says, "mpich", TRIED)


def test_what_is_known_to_crash_is_not_tried() -> None:
    assert set(to_try("openmpi")) == EVERY - {*REDUCTIONS}
    assert set(to_try("mpich")) == set(to_try("other")) == EVERY
    assert decide("auto", "yes", "openmpi", TRIED)["reduce"] is Answer.CRASHES


def test_answers_are_told_by_kind() -> None:
    table = {"send": Answer.OK, "recv": Answer.OK, "reduce": Answer.CRASHES, "scan": Answer.UNKNOWN}
    assert text_of(table) == "ok: send, recv; crashes: reduce; unknown: scan"
