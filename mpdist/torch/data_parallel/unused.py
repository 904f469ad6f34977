"""Unused: parameters that get no gradient in a backward, on this rank or on all.

By default each must get one on every rank, and the first step that misses one says
which. With `find_unused_parameters` a parameter may be left out: the ranks that
use it are averaged with zeros of the others, and where no rank uses it its
gradient stays as it was. With `static_graph` the first backward decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor

from mpdist.errors import UsageError
from mpdist.torch.data_parallel import mistakes

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.notes import Notes
    from mpdist.torch.data_parallel.slot import Slot

# So many parameters are named; there are models with thousands.
NAMED = 8


class Unused:
    """What is done about them.

    Attributes:
        is_allowed: `find_unused_parameters`.
        is_static: `static_graph`.
        find_replaced: the first of these parameters whose name in the module is another's now.
        learned_of: so many ranks had inputs when the static graph was learned; 0 before.
        touched: they got a gradient in no_sync() since the last average.
    """

    def __init__(self, is_allowed: bool, is_static: bool, where: str) -> None:
        self.is_allowed = is_allowed
        self.is_static = is_static
        self._where = where
        self.learned_of = 0
        self.find_replaced: Callable[[Sequence[Slot]], str | None] = lambda slots: None
        self.touched: set[Slot] = set()
        self._kept: dict[Slot, Tensor] = {}
        self._static: list[int] = []
        self._looked_up: set[Slot] = set()

    def forget(self) -> None:
        """Learn again what a static graph uses."""
        self.learned_of = 0

    def learn(self, slots: Sequence[Slot], used: list[int], ranks: int, is_absent: bool) -> None:
        """After the first backward: how often each hook runs in a static graph, and what no rank uses."""
        if not self.is_static:
            return
        self.learned_of, self._static = ranks, used
        if is_absent:
            return
        for slot in slots:
            slot.due = slot.fired

    def has_gradient(self, slot: Slot) -> bool:
        """Whether this rank has a gradient; with find_unused_parameters one from an earlier no_sync() counts."""
        if not self.is_allowed:
            return slot.fired > 0
        return slot.parameter.grad is not None and (slot.fired > 0 or slot in self.touched)

    def is_left(self, slot: Slot) -> bool:
        """Whether it has a gradient of no_sync() that no bucket takes, for it was frozen since."""
        return slot.handle is None and slot in self.touched and slot.parameter.grad is not None

    def begin(self) -> None:
        """A backward begins."""
        self._kept.clear()

    def keep(self, slot: Slot) -> None:
        """Remember a gradient that this rank has from before, until it is known whether a rank uses the parameter."""
        if not slot.fired and slot not in self.touched and slot.parameter.grad is not None:
            self._kept[slot] = slot.parameter.grad.clone()

    def settle(self, slots: Sequence[Slot], notes: Notes, ranks: int, is_absent: bool) -> None:
        """After the sum: gradients of parameters that some rank used, and errors for those that none may miss."""
        self.touched.clear()
        if notes.are_all_used(ranks) and not (self.is_allowed or self.is_static or is_absent):
            return
        used = notes.used()
        self._put_back(slots, used)
        if not is_absent:
            self._check_replaced([slot for slot in slots if not slot.fired])
        if self.is_static:
            self._check_static(slots, used, ranks)
        elif not self.is_allowed:
            missed = [(slot, count) for slot, count in zip(slots, used, strict=True) if count != ranks]
            if missed:
                raise self._missed(missed, ranks, is_absent)
        _give([slot for slot, ranks_using in zip(slots, used, strict=True) if ranks_using], is_absent)

    def _put_back(self, slots: Sequence[Slot], used: list[int]) -> None:
        for slot, ranks_using in zip(slots, used, strict=True):
            if not ranks_using and slot in self._kept:
                cast(Tensor, slot.parameter.grad).copy_(self._kept[slot])
        self._kept.clear()

    def _check_replaced(self, unused: Sequence[Slot]) -> None:
        """Raise where what this rank trains instead of one of these is not averaged."""
        new = [slot for slot in unused if slot not in self._looked_up]
        replaced = self.find_replaced(new) if new else None
        if replaced is not None:
            raise mistakes.is_replaced(self._where, replaced)
        self._looked_up.update(new)

    def _check_static(self, slots: Sequence[Slot], used: list[int], ranks: int) -> None:
        if ranks != self.learned_of or used == self._static:  # with fewer ranks the counts tell nothing
            return
        changed = [
            f"{slot.name} by {now} ranks, by {before} in the first"
            for slot, now, before in zip(slots, used, self._static, strict=True)
            if now != before
        ]
        raise UsageError(
            f"DistributedDataParallel on {self._where}: static_graph=True, but this backward uses other parameters "
            f"than the first one: {'; '.join(changed[:NAMED])}. Leave static_graph out, and say "
            "find_unused_parameters=True"
        )

    def _missed(self, missed: list[tuple[Slot, int]], ranks: int, is_absent: bool) -> UsageError:
        def listed(slots: Sequence[tuple[Slot, int]]) -> str:
            names = ", ".join(slot.name for slot, _ in slots[:NAMED])
            return f"{names} and {len(slots) - NAMED} more" if len(slots) > NAMED else names

        here = [(slot, count) for slot, count in missed if not slot.fired and not is_absent]
        elsewhere = [(slot, count) for slot, count in missed if slot.fired or is_absent]
        parts = []
        if here:
            parts.append(f"on this rank {listed(here)} got no gradient")
        if elsewhere:
            counts = sorted({ranks - count for _, count in elsewhere})
            parts.append(f"{listed(elsewhere)} got none on {'-'.join(map(str, counts))} other of {ranks} ranks")
        return UsageError(
            f"DistributedDataParallel on {self._where}: a backward did not reach all parameters: {'; '.join(parts)}. "
            "If some forwards use only a part of the module, say find_unused_parameters=True; a parameter that is "
            "never used is better frozen: requires_grad_(False)"
        )


def _give(slots: Sequence[Slot], is_absent: bool) -> None:
    """Parameters without a gradient on this rank get that of the others; all of them on a rank without inputs."""
    for slot in slots:
        if slot.bucket is not None and (is_absent or slot.parameter.grad is None):
            slot.bucket.give(slot)
