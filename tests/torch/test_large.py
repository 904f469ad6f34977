"""Operations on more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.ranks(2), pytest.mark.large, pytest.mark.limit(400)]

COUNT = 2**31 + 16


def test_all_reduce_and_broadcast(group: dist.ProcessGroup) -> None:
    x = torch.full((COUNT,), group.rank() + 1, dtype=torch.uint8)
    dist.all_reduce(x)
    assert x[0] == x[2**30] == x[-1] == 3
    x.fill_(group.rank())
    dist.broadcast(x, 1)
    assert x[0] == x[2**30] == x[-1] == 1


def test_gather_and_all_to_all(group: dist.ProcessGroup) -> None:
    half = torch.full((COUNT // 2,), group.rank() + 5, dtype=torch.uint8)
    out = torch.zeros(COUNT, dtype=torch.uint8)
    dist.all_gather(list(out.chunk(2)), half)
    assert (out[0], out[-1]) == (5, 6)
    dist.gather(half, list(out.zero_().chunk(2)) if group.rank() == 0 else None, 0)
    assert group.rank() or (out[0], out[-1]) == (5, 6)
    received = torch.zeros(COUNT, dtype=torch.uint8)
    out.fill_(group.rank() + 1)
    dist.all_to_all(list(received.chunk(2)), list(out.chunk(2)))
    assert (received[0], received[-1]) == (1, 2)
