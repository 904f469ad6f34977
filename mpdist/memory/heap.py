"""Heap: what a training frees stays with the process, for its next step, and lies on huge pages.

glibc gives the end of its heap back to the kernel when enough of it is free, and
takes large blocks from the kernel each time. A training frees its gradients in
each step and allocates them in the next, so the kernel clears the same pages again
and again: a third of a step of 30 ms, or nothing, as the blocks happen to lie.

NumPy asks for huge pages for its large arrays, torch does not for its tensors. On
pages of 4 KiB the kernel takes a third longer to copy from process to process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

# Numbers of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# What glibc itself takes for _TOP_PAD.
_USUAL_TOP_PAD = 128 * 1024
# Blocks from this size on come from the kernel in any case: the largest that glibc takes for it.
LARGEST_BYTES = 32 * 1024**2
# mallopt takes an int.
MOST_BYTES = 2**31 - 1
HUGE_PAGE_BYTES = 2 * 1024**2
# glibc gives all that is free at the heap's end back once that is more than is to be kept. What is set aside is free
# from the start, and what lies before it may become free, too.
_SLACK_BYTES = 4 * LARGEST_BYTES
# The heap grows when a block doesn't fit into what is free at its end. By itself glibc keeps at most 64 MiB free there.
_MOST_BLOCKS = 3


@cache
def keep_freed(nbytes: int) -> bool:
    """Let the process keep so many bytes that it has freed, at the end of its heap, for what it allocates next.

    Nearly as many are set aside at once, as addresses without memory, for which the kernel takes huge pages as they
    come into use, if it has any and lets programs ask for them.

    Args:
        nbytes: 0: leave everything as it is.

    Returns:
        Whether it does. Not where the user steers the allocator by its own variables, nor with another C library.
    """
    is_steered = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not nbytes or is_steered or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    nbytes = min(nbytes, MOST_BYTES)
    try:
        libc = _libc()
        # Either of them keeps glibc from finding both by itself, so both are given.
        is_kept = bool(libc.mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and libc.mallopt(_TRIM_THRESHOLD, nbytes))
    except (AttributeError, OSError, TypeError):  # no such function; no C library to ask
        return False
    if is_kept and nbytes > _SLACK_BYTES and _are_addresses_free():
        _set_aside(libc, nbytes - _SLACK_BYTES)
    return is_kept


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    libc.sbrk.argtypes, libc.sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_void_p
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _are_addresses_free() -> bool:
    """Whether addresses without memory count for nothing, and the kernel knows of huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    import resource

    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


def _set_aside(libc: Any, nbytes: int) -> None:
    """Let the heap grow by so many bytes, which nothing has touched yet, and ask for huge pages there.

    Without effect where the heap can't grow, or where another allocator has taken the place of glibc's.
    """
    first = libc.sbrk(0)
    libc.mallopt(_TOP_PAD, nbytes)
    blocks: list[int | None] = []
    while libc.sbrk(0) == first and len(blocks) < _MOST_BLOCKS:
        blocks.append(libc.malloc(LARGEST_BYTES - HUGE_PAGE_BYTES))
    libc.mallopt(_TOP_PAD, _USUAL_TOP_PAD)
    for block in blocks:
        libc.free(block)
    start, end = (each // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES for each in (first + HUGE_PAGE_BYTES - 1, libc.sbrk(0)))
    if end > start:
        libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)
