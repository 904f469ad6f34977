"""Turn: how long an algorithm may work before the event loop gets its turn."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

# One piece of copying or adding more may follow, of up to 0.3 ms where memory is slow; the whole is to stay below 1 ms.
SECONDS = 0.0004


class Turn:
    """The present turn of one algorithm; yield it when it is over."""

    __slots__ = ("_end", "_engine", "_is_given_away")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._end = perf_counter() + SECONDS
        self._is_given_away = False

    @property
    def is_over(self) -> bool:
        return perf_counter() > self._end

    def Test(self) -> bool:
        """False once, which gives the turn away; then True."""
        if not self._is_given_away:
            self._is_given_away = True
            self._engine.credit = 0
            return False
        self._is_given_away = False
        self._end = perf_counter() + SECONDS
        return True
