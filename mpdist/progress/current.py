"""Current: the one Engine of this process, while mpdist is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.errors import UsageError

if TYPE_CHECKING:
    from mpdist.progress.engine import Engine

_engine: Engine | None = None


def engine(op: str) -> Engine:
    """The Engine; raises UsageError where mpdist is not started."""
    if _engine is None:
        raise UsageError(f"{op} was called before mpdist.init() or mpdist.run(), or after mpdist.finalize()")
    return _engine


def set_engine(engine: Engine | None) -> None:
    """Start or stop being the current one."""
    global _engine
    _engine = engine
