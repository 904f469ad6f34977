"""average: one call for a list, a dict or any nesting of arrays."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.errors import UsageError
from mpdist.gradients.averager import GradientAverager
from mpdist.gradients.talk import Conversation, Talk
from mpdist.gradients.tree import Tree, leaves_of, with_leaves

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.memory import ReduceOp


class Averaging:
    """A tree that is being averaged: await it, or wait for it, any number of times: it is averaged once."""

    def __init__(self, averager: GradientAverager, tree: Tree) -> None:
        self._conversation = Conversation(partial(_averaged, averager, tree, []))
        self._is_waited_for = False

    def __await__(self) -> Generator[Any, None, Tree]:
        self._is_waited_for = True
        return self._conversation.__await__()

    def wait(self, timeout: float | None = None) -> Tree:
        """The same where no event loop runs; `timeout` in seconds is for each message."""
        self._is_waited_for = True
        return self._conversation.wait(timeout)

    def __del__(self) -> None:
        if not self._is_waited_for and not sys.is_finalizing():
            warnings.warn(
                "mpdist.average() was neither awaited nor waited for, so nothing was averaged: write `tree = await "
                "mpdist.average(comm, tree)`, or `.wait()` where no event loop runs",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )


def _averaged(averager: GradientAverager, tree: Tree, results: list[list[Any]]) -> Talk[Tree]:
    """`results` keeps those of the step, which is made once."""
    if not results:
        results[:] = [(yield from averager.step_end())]
    return with_leaves(tree, iter(results[0]))


def average(comm: Communicator, tree: Tree, *, op: str | ReduceOp = "avg", compress: str | None = None) -> Averaging:
    """Average all arrays of a tree over the ranks, in few messages.

    `gradients = await mpdist.average(comm, gradients)`, or `.wait()` where no event loop runs.

    Args:
        tree: a list, tuple, dict or any nesting of arrays of any library, of the same form on all ranks.
        op, compress: as GradientAverager has them.

    Returns:
        An awaitable of a tree of the same form, however often it is awaited the same. Arrays that can be written hold
        the result and are in it; immutable ones (JAX) have come back new.

    Raises:
        UsageError: a part of the tree is of a type that cannot be made anew.
        CollectiveMismatch: when awaited, on all ranks: arrays differ in number, shape or type, or op, or compress.
    """
    leaves = leaves_of(tree)
    arrays = [x for _, x in leaves]
    try:
        with_leaves(tree, iter(arrays))
    except TypeError as error:  # better now than when all is sent
        raise UsageError(
            f"a part of the tree cannot be made anew with other arrays: {error}; take lists, tuples or dicts"
        ) from error
    averager = GradientAverager(comm, arrays, op=op, compress=compress, names=[path or "tree" for path, _ in leaves])
    averager.order = list(range(len(leaves)))  # all are here: nothing is to be learned
    return Averaging(averager, tree)
