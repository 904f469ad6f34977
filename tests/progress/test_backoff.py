"""Back-off: how long a waiter sleeps, without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.progress.backoff import (
    REQUEST_CAP_SECONDS,
    REQUEST_HOT_SECONDS,
    REQUEST_SECONDS,
    TURN_BYTES,
    TURN_CREDIT,
    Backoff,
    message_credit,
    policy,
)

SECONDS = st.floats(0, 100)


@given(SECONDS)
def test_nobody_sleeps_while_hot_and_never_longer_than_the_cap(idle: float) -> None:
    backoff = Backoff()
    delay = backoff.delay(idle)
    assert (delay == 0) == (idle < backoff.hot_seconds)
    assert delay <= backoff.cap_seconds


@given(SECONDS)
def test_a_sleep_adds_no_more_than_its_fraction_to_a_wait(idle: float) -> None:
    backoff = Backoff()
    assert backoff.delay(idle) <= backoff.fraction * idle


@given(SECONDS, st.booleans())
def test_who_is_rung_sleeps_for_longer_only_after_a_long_wait(idle: float, has_requests: bool) -> None:
    backoff = Backoff()
    usual, rung = backoff.delay(idle, has_requests), backoff.delay(idle, has_requests, is_rung=True)
    if has_requests or idle <= backoff.cap_seconds / backoff.rung_fraction:
        assert rung == usual
    else:
        assert usual < rung <= min(backoff.rung_fraction * idle, backoff.rung_cap_seconds)
    assert backoff.delay(10, is_rung=True) == backoff.rung_cap_seconds


@given(SECONDS, SECONDS)
def test_who_waited_longer_sleeps_at_least_as_long(a: float, b: float) -> None:
    backoff = Backoff()
    assert backoff.delay(min(a, b)) <= backoff.delay(max(a, b))


@given(SECONDS)
def test_nobody_sleeps_while_a_request_may_be_moving_data_and_then_shortly(idle: float) -> None:
    delay = Backoff().delay(idle, has_requests=True)
    assert (delay == 0) == (idle < REQUEST_HOT_SECONDS)
    if idle < REQUEST_SECONDS:
        assert delay <= REQUEST_CAP_SECONDS
    else:
        assert delay == Backoff().delay(idle)


@pytest.mark.parametrize(("ranks", "cores"), [(1, 1), (2, 2), (4, 8)])
def test_ranks_with_a_core_each_are_patient(ranks: int, cores: int) -> None:
    assert not policy(ranks, cores).yields


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (4, 2), (3, 2)])
def test_ranks_that_share_a_core_give_it_away(ranks: int, cores: int) -> None:
    shared = policy(ranks, cores)
    assert shared.yields
    assert shared.inline_polls < policy(1, 1).inline_polls


@given(st.integers(0, 2**40))
def test_a_message_costs_at_least_one_credit_and_more_the_larger_it_is(nbytes: int) -> None:
    credit = message_credit(nbytes)
    assert credit >= 1
    assert message_credit(nbytes + TURN_BYTES) == credit + 1


def test_a_turn_of_small_messages_is_bounded() -> None:
    assert TURN_CREDIT // message_credit(8) <= 64
