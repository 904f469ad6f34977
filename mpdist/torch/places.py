"""Places: the line of the user's program that called an operation, for the diagnosis.

mpdist's communicator notes its caller, which here is this package, or torch.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpdist.progress.collective import Place

_LIBRARIES = ("mpdist.", "torch.")


def users_place() -> Place:
    """Where the innermost frame outside mpdist and torch is; where there is none, the outermost one."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def note(channel: Any, posted: Any) -> None:
    """Let a pending collective, and the record of the channel's last one, say where the user called it."""
    place = users_place()
    posted._place = place
    if channel.recent and channel.sequence == posted.sequence:
        channel.recent[-1] = (*channel.recent[-1][:-1], place)
