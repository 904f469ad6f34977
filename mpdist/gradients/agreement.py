"""Agreement: all ranks average the same arrays, in the same order of buckets.

Made once, when the first step ends: each rank has then seen in which order its
arrays became ready. The order that all use is that of the mean place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpdist.errors import CollectiveMismatch
from mpdist.gradients.buckets import agreed_order, positions_of
from mpdist.gradients.talk import Post, Talk, now

if TYPE_CHECKING:
    from mpdist.comm import Communicator


def agree_on_order(comm: Communicator, seen: Sequence[int], count: int, post: Post = now) -> Talk[list[int]]:
    """The order of `count` arrays, from those in which the ranks have seen them become ready."""
    positions = yield post(comm.all_reduce, np.array(positions_of(seen, count), np.int64))
    return agreed_order(positions.tolist())


def check_descriptions(
    comm: Communicator, what: str, descriptions: Sequence[str], settings: str = "", post: Post = now
) -> Talk[None]:
    """Compare a list of descriptions between the ranks, and what is to be done with all of them.

    Raises:
        CollectiveMismatch: on all ranks; it names the settings, or the first description that differs, on which
            ranks, and both.
    """
    text = json.dumps([settings, *descriptions]).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    digests = yield post(comm.all_gather, digest, out=np.empty((comm.size, digest.size), np.uint8))
    if (digests == digests[0]).all():
        return
    texts = yield post(comm.all_gather, [np.frombuffer(text, np.uint8)])
    everyone = [json.loads(bytes(each)) for each in texts]
    chosen = [each.pop(0) for each in everyone]
    about, difference = (what, first_difference(everyone)) if len(set(chosen)) == 1 else ("settings", differing(chosen))
    raise CollectiveMismatch(
        f"{about} differ between the ranks of '{comm.name}': {difference}",
        {rank: f"{len(each)} {what}" for rank, each in enumerate(everyone)},
    )


def first_difference(everyone: Sequence[Sequence[str]]) -> str:
    """Where the ranks' lists differ first, in words."""
    for index in range(max(len(each) for each in everyone)):
        texts = [f"number {index} is {each[index] if index < len(each) else 'nothing'}" for each in everyone]
        if len(set(texts)) > 1:
            return differing(texts)
    return "nothing"


def differing(texts: Sequence[str]) -> str:
    """The ranks' different texts, each once."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in found.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
