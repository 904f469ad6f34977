"""Buckets: which arrays travel together, and in which order the buckets start.

Pure functions. Small arrays share a message, because each message costs its
latency; large ones go early, because the rest of backward hides them. All ranks
must come to the same answer, so everything that goes in is agreed before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# Arrays are grouped up to this size: larger buckets start later, and the last one is never hidden; smaller ones pay
# more latency. Precedents: torch DDP 25 MiB, MLX 32 MiB, both over a network. Ours: bench/ddp.py.
BUCKET_BYTES = 8 * 1024**2

# Nothing hides the last bucket. So towards the end they get smaller: each takes this part of what is left, down to a
# size at which the messages between two hosts cost little more than their bytes (1 Gbit/s: 8 ms).
TAPER = 4
SMALLEST_BYTES = 1024**2

# Where backward hides messages, nothing is under way before the first bucket is full.
FIRST_BYTES = 1024**2

# Where nothing is hidden, because all cores compute, several buckets only disturb: each evicts what backward has in its
# caches, and waits for a rank that comes later to it. A limit only so that no message gets out of hand.
UNHIDDEN_BUCKET_BYTES = 256 * 1024**2

# The same for a module on a GPU, where a message costs the thread that queues backward 0.3 ms and more, which is as
# long as some 50 MB between two GPUs take.
DEVICE_BUCKET_BYTES = 32 * 1024**2
DEVICE_SMALLEST_BYTES = 16 * 1024**2


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    smallest_bytes: int = SMALLEST_BYTES,
    first_bytes: int | None = None,
) -> list[list[int]]:
    """Group arrays into buckets.

    Args:
        nbytes: size of each array.
        kinds: what may not be mixed in one bucket, such as the dtype.
        order: indices of the arrays, in the order in which they become ready; those left out are in no bucket.
        bucket_bytes, smallest_bytes: a bucket is closed when it holds the first, or the TAPERth part of all that is
            left, but at least the second; an array is never cut.
        first_bytes: so many close the first bucket.

    Returns:
        Indices of the arrays in each bucket; the buckets in the order in which they become full.
    """
    opened: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    left = sum(nbytes[index] for index in order)
    for index in order:
        kind = kinds[index]
        opened.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + nbytes[index]
        most = min(bucket_bytes, max(smallest_bytes, left // TAPER))
        if filled[kind] >= (min(most, first_bytes) if first_bytes and not closed else most):
            left -= filled.pop(kind)
            closed.append(opened.pop(kind))
    place = {index: position for position, index in enumerate(order)}
    return sorted([*closed, *opened.values()], key=lambda bucket: place[bucket[-1]])


def agreed_order(positions: Sequence[int]) -> list[int]:
    """Indices sorted by their position, summed over the ranks; equal ones by index."""
    return sorted(range(len(positions)), key=lambda index: (positions[index], index))


def positions_of(order: Sequence[int], count: int) -> list[int]:
    """For each of `count` indices its place in `order`; those that are missing come last, from high to low."""
    missing = sorted(set(range(count)) - set(order), reverse=True)
    positions = [0] * count
    for position, index in enumerate([*order, *missing]):
        positions[index] = position
    return positions
