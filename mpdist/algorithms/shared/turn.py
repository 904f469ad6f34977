"""Turn: how long an algorithm may work before the event loop gets its turn."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine


class Turn:
    """The present turn of one algorithm; yield it when it is over.

    Attributes:
        away: seconds for which it was given away so far.
    """

    __slots__ = ("_end", "_engine", "_given_away", "away")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._end = perf_counter() + engine.turn_seconds
        self._given_away: float | None = None
        self.away = 0.0

    def restart(self) -> None:
        """It has been given away by waiting for others."""
        self._end = perf_counter() + self._engine.turn_seconds

    @property
    def is_over(self) -> bool:
        return perf_counter() > self._end

    def Test(self) -> bool:
        """False once, which gives the turn away; then True."""
        now = perf_counter()
        if self._given_away is None:
            self._given_away = now
            self._engine.credit = 0
            return False
        self.away += now - self._given_away
        self._given_away = None
        self._end = now + self._engine.turn_seconds
        return True
