"""Communication hooks of mpdist's own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from mpdist.errors import UsageError  # noqa: E402
from mpdist.torch import bf16_compress  # noqa: E402


def test_a_hook_without_a_process_group_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", None)
    bucket: Any = None
    with pytest.raises(
        UsageError, match=r"takes torch's default process group, and there is none: call .*\(\"mpdist\"\)"
    ):
        bf16_compress(None, bucket)
