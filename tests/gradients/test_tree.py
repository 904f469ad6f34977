"""Trees: the leaves of any nesting, and back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest

from mpdist.gradients.tree import leaves_of, with_leaves


class Pair(NamedTuple):
    a: object
    b: object


def test_leaves_have_the_path_that_reaches_them() -> None:
    tree = {"b": [1, None, (2,)], "a": 3}
    assert leaves_of(tree) == [("['a']", 3), ("['b'][0]", 1), ("['b'][2][0]", 2)]


@pytest.mark.parametrize(
    "tree",
    [1, None, [], {}, [1, [2, 3]], (1, None), {"b": 1, "a": 2}, OrderedDict(b=1, a=Pair(2, [3])), {1: 1, "1": 2}],
)
def test_form_is_kept(tree: object) -> None:
    values = [value for _, value in leaves_of(tree)]
    copy = with_leaves(tree, iter(values))
    assert copy == tree
    assert type(copy) is type(tree)
    if isinstance(tree, dict):
        assert list(copy) == list(tree)
        assert copy is not tree


def test_defaultdict_keeps_its_factory() -> None:
    copy = with_leaves(defaultdict(list, b=1, a=[2]), iter([2, 1]))
    assert copy == {"b": 1, "a": [2]}
    assert copy["new"] == []
