"""The pure parts: names, options, the store's table."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpdist.torch import names, options, staging, uneven
from mpdist.torch.process_group import ProcessGroup
from mpdist.torch.store_table import Table


def test_every_operation_has_all_its_names() -> None:
    for name in names.OPERATIONS:
        assert callable(getattr(ProcessGroup, name))
        for other in names.OTHER_NAMES.get(name, ()):
            assert getattr(ProcessGroup, other) is getattr(ProcessGroup, name)


def test_every_operation_of_this_torch_is_there() -> None:
    """Whatever its process group can do that moves tensors is ours, not the base's."""
    known = {*names.OPERATIONS, *(other for others in names.OTHER_NAMES.values() for other in others)}
    verbs = ("all", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "_allgather", "_reduce")
    theirs = {
        name for name in dir(dist.ProcessGroup) if name.startswith(verbs) and callable(getattr(dist.ProcessGroup, name))
    }
    assert theirs <= known, theirs - known


def test_no_method_that_torch_takes_for_something_else() -> None:
    assert not hasattr(ProcessGroup, "new_group")  # torch would delegate to it, and drop the backend


def test_options_in_every_form() -> None:
    x = torch.ones(1)
    assert options.only(x, "op") is x
    assert options.only([x], "op") is x
    with pytest.raises(RuntimeError, match="op takes one tensor, got 2"):
        options.only([x, x], "op")
    assert list(options.only_list([[x, x]], "op", 2)) == list(options.only_list([x, x], "op", 2)) == [x, x]
    assert options.root_of(3) == 3
    assert options.root_of(SimpleNamespace(rootRank=2)) == 2
    assert options.is_async(None)
    assert not options.is_async(SimpleNamespace(asyncOp=False))
    assert options.seconds_of(SimpleNamespace(timeout=timedelta(milliseconds=-1))) is None
    assert options.seconds_of(SimpleNamespace(timeout=timedelta(seconds=2))) == 2
    assert options.seconds_of(timedelta(seconds=3)) == 3


def test_tensors_that_lie_one_behind_the_other_are_one() -> None:
    whole = torch.arange(12.0)
    parts = list(whole.chunk(3))
    flat = staging.one_behind_the_other(parts)
    assert flat is not None
    assert flat.data_ptr() == whole.data_ptr()
    assert torch.equal(flat, whole)
    assert staging.one_behind_the_other(parts[::-1]) is None
    assert staging.one_behind_the_other([whole[::2], whole[1::2]]) is None
    assert staging.one_behind_the_other([torch.zeros(2), torch.zeros(2)]) is None
    room, finish = staging.room_for([torch.zeros(2), torch.zeros(3)])
    assert room.shape == (5,)
    assert finish is not None


class Asking:
    """Asks a table, and keeps what it answers."""

    def __init__(self) -> None:
        self.table = Table()
        self.number = 0

    def __call__(self, op: str, *arguments: Any) -> list[Any]:
        replies: list[Any] = []
        self.number += 1
        self.table.ask((0, self.number), op, arguments, replies.append)
        return replies


def test_requests_wait_for_their_keys() -> None:
    ask = Asking()
    waiting, getting = ask("wait", ["a", "b"]), ask("get", ["b"])
    assert waiting == getting == []
    ask("set", "a", b"1")
    assert waiting == getting == []
    ask("set", "b", b"2")
    assert waiting == [None]
    assert getting == [[b"2"]]


def test_a_withdrawn_request_is_not_answered() -> None:
    ask = Asking()
    waiting = ask("wait", ["a"])
    ask.table.withdraw((0, ask.number))
    ask("set", "a", b"")
    assert waiting == []


def test_counters_and_comparisons() -> None:
    ask = Asking()
    assert [ask("add", "n", 2), ask("add", "n", -3)] == [[2], [-1]]
    assert ask("compare_set", "k", b"", b"new") == [b"new"]
    assert ask("compare_set", "k", b"old", b"other") == [b"new"]
    assert ask("compare_set", "missing", b"old", b"other") == [b"old"]
    assert ask("delete", "k") == [True]
    assert ask("delete", "k") == [False]
    assert ask("keys", "") == [["n"]]


def test_counts_beyond_32_bits_are_told_in_larger_units() -> None:
    assert uneven.in_larger_units(4, [3, 5]) == (4, [[3, 5]])
    unit, (counts,) = uneven.in_larger_units(4, [2**31, 2**31 + 2**10])
    assert [unit * count for count in counts] == [4 * 2**31, 4 * (2**31 + 2**10)]
    assert sum(counts) <= uneven.MAX_COUNT
    unit, (sent, received) = uneven.in_larger_units(1, [3 * 2**31, 0], [6 * 2**31, 2**31])
    assert unit <= uneven.MAX_COUNT
    assert [unit * count for count in sent] == [3 * 2**31, 0]
    assert [unit * count for count in received] == [6 * 2**31, 2**31]
