"""Copying: the memory itself as a contender, which no message passing can be much faster than."""

from __future__ import annotations

import numpy as np

from mpdist.bench.contenders import Bound, as_run, private
from mpdist.bench.operations import ITEM_BYTES

COPY = "np.copyto of as much by all ranks at once"


def copying(nbytes: int) -> Bound:
    """Every rank copies so many bytes in its own memory."""
    source, target = (private(nbytes // ITEM_BYTES) for _ in range(2))
    source[:] = target[:] = 0

    def run(count: int) -> None:
        for _ in range(count):
            np.copyto(target, source)

    return Bound(as_run(run), None, None)
