"""Heap: what a training frees stays with the process, for its next step.

glibc gives the end of its heap back to the kernel when enough of it is free, and
takes large blocks from the kernel each time. A training frees its gradients in
each step and allocates them in the next, so the kernel clears the same pages again
and again: a third of a step of 30 ms, or nothing, as the blocks happen to lie.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# Numbers of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks from this size on come from the kernel in any case: the largest that glibc takes for it.
LARGEST_BYTES = 32 * 1024**2
# mallopt takes an int.
MOST_BYTES = 2**31 - 1


@cache
def keep_freed(nbytes: int) -> bool:
    """Let the process keep so many bytes that it has freed, at the end of its heap, for what it allocates next.

    Args:
        nbytes: 0: leave everything as it is.

    Returns:
        Whether it does. Not where the user steers the allocator by its own variables, nor with another C library.
    """
    is_steered = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not nbytes or is_steered or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # Either of them keeps glibc from finding both by itself, so both are given.
        return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, min(nbytes, MOST_BYTES)))
    except (AttributeError, OSError, TypeError):  # no such function; no C library to ask
        return False
