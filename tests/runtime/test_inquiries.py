"""Inquiries: each is acted on, whatever becomes of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpdist.progress.engine import Engine
from mpdist.runtime.inquiries import Inquiries, Inquiry


def test_one_that_fails_keeps_no_other_from_being_acted_on() -> None:
    engine = Engine()
    engine.meeting = cast(Any, SimpleNamespace(rank=0))
    inquiries, concluded = Inquiries(engine, None), []

    def fail(inquiry: Inquiry) -> None:
        raise ZeroDivisionError(inquiry.number)

    for then in (fail, concluded.append, fail):
        inquiries.ask([], [], then)
    with pytest.raises(ExceptionGroup) as caught:
        inquiries.conclude()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError] * 2
    assert [inquiry.number for inquiry in concluded] == [2]
    assert len(inquiries) == 0
