"""Wildcards: any source, any tag. Not numbers: a literal -1 means different things to the two MPIs."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal


class Wildcard(Enum):
    """Patterns of a receive."""

    ANY_SOURCE = "any rank"
    ANY_TAG = "any tag"

    def __repr__(self) -> str:
        return f"mpdist.{self.name}"


ANY_SOURCE: Final = Wildcard.ANY_SOURCE
ANY_TAG: Final = Wildcard.ANY_TAG

Source = int | Literal[Wildcard.ANY_SOURCE]
Tag = int | Literal[Wildcard.ANY_TAG]
