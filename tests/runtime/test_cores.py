"""Cores: who shares them; pure."""

from __future__ import annotations

import os

import pytest

from mpdist import Communicator
from mpdist.runtime.cores import Place, crowd


def place(machine: str, *cores: int) -> Place:
    return Place(machine, frozenset(cores))


@pytest.mark.parametrize(
    ("own", "others", "wanted"),
    [
        (place("a", 0, 1), [], (1, 2)),
        (place("a", 0, 1), [place("a", 0, 1)], (2, 2)),
        (place("a", 0, 1), [place("b", 0, 1)] * 3, (1, 2)),
        (place("a", 0, 1), [place("a", 2, 3)] * 2, (1, 2)),
        (place("a", 0), [place("a", 1), place("a", 0)], (2, 1)),
        (place("a", 0, 1), [place("a", 0), place("a", 1), place("b", 0)], (3, 2)),
        (place("a", *range(8)), [place("a", 0), place("a", 0)], (2, 1)),
    ],
    ids=["alone", "a core each", "other machines", "containers", "bound", "partly bound", "two bound to one"],
)
def test_those_on_one_machine_with_a_core_in_common_share_it(
    own: Place, others: list[Place], wanted: tuple[int, int]
) -> None:
    assert crowd(own, [*others[:1], own, *others[1:]]) == wanted


def test_this_process_is_somewhere() -> None:
    here = Place.here()
    assert here == Place.here()
    assert here.machine
    assert here.cores == os.sched_getaffinity(0)


@pytest.mark.ranks(2)
def test_ranks_of_one_machine_see_each_other(comm: Communicator) -> None:
    places = comm.all_gather_object(Place.here()).wait()
    assert len({each.machine for each in places}) == 1
