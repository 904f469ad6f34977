"""Trees: nested lists, tuples, named tuples and dicts whose leaves are arrays."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

Tree = Any
"""An array, None, or a list, tuple or dict of trees."""


def leaves_of(tree: Tree, path: str = "") -> list[tuple[str, Any]]:
    """Path and array of each leaf, in order; None is no leaf, and a dict's are in the order of its sorted keys."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key in _sorted_keys(tree) for leaf in leaves_of(tree[key], f"{path}[{key!r}]")]
    if isinstance(tree, list | tuple):
        return [leaf for number, branch in enumerate(tree) for leaf in leaves_of(branch, f"{path}[{number}]")]
    return [(path, tree)]


def with_leaves(tree: Tree, leaves: Iterator[Any]) -> Tree:
    """A tree of the same form with these leaves."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        branches = copy(tree)  # a defaultdict is not made from pairs; and this keeps the order of the keys
        for key in _sorted_keys(tree):
            branches[key] = with_leaves(tree[key], leaves)
        return branches
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(with_leaves(branch, leaves) for branch in tree))
    if isinstance(tree, list):
        result = copy(tree)
        result[:] = [with_leaves(branch, leaves) for branch in tree]
        return result
    if isinstance(tree, tuple):
        return type(tree)(with_leaves(branch, leaves) for branch in tree)
    return next(leaves)


def _sorted_keys(tree: dict[Any, Any]) -> list[Any]:
    """Ranks may have filled the dict in different orders."""
    try:
        return sorted(tree)
    except TypeError:
        return sorted(tree, key=lambda key: (type(key).__name__, str(key)))
