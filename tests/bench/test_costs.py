"""The cost model of bench/costs.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "costs.py"
    spec = importlib.util.spec_from_file_location("costs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["costs"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


costs = load()
MESSAGE, LINK = costs.Line(1e-6, 1e-10), costs.Line(1e-5, 1e-8)
NODE = costs.Machine(MESSAGE, LINK, 2e-10, costs.Line(3e-6, 1e-10), 4)
N = 1e6


def test_ring_moves_each_byte_nearly_twice() -> None:
    p = 4
    expected = 6 * 2 * (1e-6 + N / p * 1e-10) + 3 * N / p * 2e-10  # one core copies what comes and what goes
    assert costs.ring(N, costs.Layout(1, p), NODE) == pytest.approx(expected)


def test_recursive_doubling_sends_all_in_every_step() -> None:
    assert costs.recursive_doubling(N, costs.Layout(1, 4), NODE) == pytest.approx(2 * (2e-6 + N * 4e-10))


def test_halving_sends_the_far_ranks_the_small_pieces() -> None:
    inside = 2 * 2 * (1e-6 + N / 2 * 1e-10) + N / 2 * 2e-10
    over = 2 * (1e-5 + 2 * N / 4 * 1e-8) + N / 4 * 2e-10  # the two ranks of a node share its link
    assert costs.halving_doubling(N, costs.Layout(2, 2), NODE) == pytest.approx(inside + over)


def test_ranks_beyond_a_power_of_two_cost_two_more_messages() -> None:
    three, two = (costs.recursive_doubling(N, costs.Layout(1, p), NODE) for p in (3, 2))
    assert three - two == pytest.approx(2 * 2 * (1e-6 + N * 1e-10) + N * 2e-10)


def test_shared_memory_of_private_arrays_costs_copies_of_what_is_the_others() -> None:
    layout = costs.Layout(1, 2)
    resident, private = costs.shared_memory(N, layout, NODE), costs.private_memory(N, layout, NODE)
    assert resident == pytest.approx(3e-6 + N / 2 * 2e-10 + N / 2 * 1e-10)
    assert private - resident == pytest.approx(2 * N / 2 * 1e-10)


def test_hierarchical_reduces_in_the_node_while_a_slice_is_on_the_link() -> None:
    """So the faster of both takes no time but for one slice."""
    nbytes = 64 * 2 * costs.SLICE_BYTES
    for link, copying in ((1e-8, 1e-10), (1e-10, 1e-8)):
        machine = costs.Machine(costs.Line(0, 0), costs.Line(0, link), 0, costs.Line(0, copying), 2)
        inside, over = 1.5 * nbytes * copying, nbytes * link
        expected = max(inside, over) + min(inside, over) / 64
        assert costs.hierarchical(nbytes, costs.Layout(2, 2), machine) == pytest.approx(expected)


def test_hierarchical_sends_no_byte_more_than_it_must() -> None:
    free = costs.Machine(costs.Line(0, 0), costs.Line(0, 1e-8), 0, costs.Line(0, 0), 4)
    for nodes in (2, 4, 8):
        least = 2 * (nodes - 1) / nodes * N * 1e-8
        assert costs.hierarchical(N, costs.Layout(nodes, 4), free) == pytest.approx(least)


def test_more_ranks_than_cores_take_turns() -> None:
    crowded = costs.Machine(MESSAGE, LINK, 2e-10, costs.Line(3e-6, 1e-10), 2)
    layout = costs.Layout(1, 4)
    assert costs.ring(N, layout, crowded) == pytest.approx(2 * costs.ring(N, layout, NODE))


def test_best_names_the_fastest() -> None:
    layout = costs.Layout(1, 4)
    assert costs.best(8, layout, NODE, costs.FLAT)[0] == "recursive doubling"
    assert costs.best(1e9, layout, NODE, costs.FLAT)[0] != "recursive doubling"
    assert "hierarchical" in costs.algorithms(costs.Layout(2, 2))
    assert "hierarchical" not in costs.algorithms(layout)


def test_fit_finds_the_constants_again() -> None:
    sizes = [8.0, 1e3, 1e5, 1e7]
    found = costs.fit_line(sizes, [MESSAGE.time(size) for size in sizes])
    assert (found.alpha, found.beta) == (pytest.approx(1e-6), pytest.approx(1e-10))


def test_a_link_that_lets_a_burst_pass_is_as_fast_as_its_long_messages() -> None:
    link = costs.fit_link([8.0, 1e5, 1e6, 4e6], [1e-5, 4e-4, 8e-3 + 1e-5, 32e-3 + 1e-5])
    assert (link.alpha, link.beta) == (1e-5, pytest.approx(8e-9))


def test_fit_gives_no_negative_constant() -> None:
    assert costs.fit([[1, 1, 1], [1, 2, 3]], [3, 2, 1])[1] == 0


def test_error_is_relative() -> None:
    assert costs.median_error([(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)]) == 0.5


def test_only_what_does_not_hide_costs_time() -> None:
    assert costs.efficiency(1, 1) == 0.5
    assert costs.efficiency(1, 0.5, 0.6) == 1
    assert costs.efficiency(1, 1.5, 0.5) == 0.5
