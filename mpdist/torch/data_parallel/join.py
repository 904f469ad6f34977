"""Join: ranks with fewer inputs take part in the others' steps until all are done.

torch's context manager, which shadows each collective that the others make, over
our communicator: it needs no process group. In each forward all ranks say how
many still have inputs, and whether backward will average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.algorithms.join import Join, JoinHook

from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.module import DistributedDataParallel


class Roll:
    """Who still has inputs: a small sum in each forward."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def call(self, has_inputs: bool, averages: bool = False, gives_up: bool = False) -> tuple[int, bool, bool]:
        """Ranks that have inputs, whether one of them averages in its backward, and whether one gives up."""
        numbers = np.array([has_inputs, averages, gives_up], np.int64)
        finish(self._comm.all_reduce(numbers))
        return int(numbers[0]), bool(numbers[1]), bool(numbers[2])


class OwnJoin(Join):
    """torch's Join for one module, over its own communicator."""

    def __init__(self, module: DistributedDataParallel, enable: bool, throws: bool, **kwargs: Any) -> None:
        self._module = module
        super().__init__([module], enable, throws, **kwargs)

    def _extract_dist_info(self) -> None:
        self._process_group = None
        self._rank = self._module.comm.rank
        self._device = self._module.device
        self._module._joins_by_itself = True

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            super().__exit__(kind, value, traceback)
        finally:
            self._module._left_join()

    def _get_num_nonjoined_procs(self) -> int:
        ranks, averages, _ = self._module._roll.call(False, gives_up=self._throw_on_early_termination)
        self._module._others_average = averages
        self._module._set_contributors(ranks)
        return ranks

    def _notify_procs_to_terminate(self) -> None:
        raise RuntimeError(f"rank {self._rank} has no inputs left, and others have: throw_on_early_termination=True")


class DataParallelHook(JoinHook):
    """What a rank without inputs does in each step of the others."""

    def __init__(self, module: DistributedDataParallel, divides_by_all: bool) -> None:
        self._module = module
        module._divides_by_all = divides_by_all

    def main_hook(self) -> None:
        self._module._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._module._take_last_parameters(is_last_joiner)


def authority(comm: Communicator, is_candidate: bool) -> int:
    """The highest rank that has what all others need."""
    number = torch.tensor([comm.rank if is_candidate else -1], device="cpu")
    finish(comm.all_reduce(number, op="max"))
    return int(number.item())
