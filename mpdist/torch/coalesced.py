"""Coalesced: several collectives as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.torch.collectives import Collectives
from mpdist.torch.devices import check_together
from mpdist.torch.errors import WrongCall
from mpdist.torch.group import SeveralWorks
from mpdist.torch.staging import Finish, check_output, joined, octets, readable, writable, write

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

Tensors = Sequence[Tensor]


class Coalesced(Collectives):
    """Operations on lists of tensors: for small ones one message is cheaper than many."""

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """all_gather_single of each pair."""
        for out, x in zip(outputs, inputs, strict=True):
            if out.numel() != x.numel() * self._size:
                raise WrongCall(
                    f"all_gather: an output has {out.numel()} elements, needed {self._size} x {x.numel()}, one block "
                    "for each rank"
                )
        rooms = [writable(out) for out in outputs]
        blocks = [list(room.detach().view(self._size, -1)) for room, _ in rooms]
        finishes = [finish for _, finish in rooms if finish is not None]
        return self._gather_all(blocks, inputs, opts, outputs, finishes)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        """all_gather of several tensors; `output_lists[r][k]` is input k of rank r."""
        if len(output_lists) != self._size or any(len(outs) != len(inputs) for outs in output_lists):
            raise WrongCall(
                f"output lists should be equal to world size: {self._size} lists of {len(inputs)} tensors are needed, "
                f"got {[len(outs) for outs in output_lists]}"
            )
        blocks = [[outs[k] for outs in output_lists] for k in range(len(inputs))]
        outputs = [tensor for outs in output_lists for tensor in outs]
        for out in outputs:
            check_output(out)
        return self._gather_all(blocks, inputs, opts, outputs)

    def _gather_all(
        self, blocks: Sequence[Tensors], inputs: Tensors, opts: Any, outputs: Tensors, finishes: Sequence[Finish] = ()
    ) -> TorchWork:
        """Block r of `blocks[k]` is input k of rank r. All inputs of a rank travel as bytes, one behind the other."""
        check_together([*inputs, *outputs])
        parts = [octets(readable(x)) for x in inputs]
        packed = joined(parts)
        everyone = packed.new_empty((self._size, packed.numel()))
        counts = [part.numel() for part in parts]

        def hand_out() -> None:
            for rank in range(self._size):
                for outs, part in zip(blocks, torch.split(everyone[rank], counts), strict=True):
                    write(outs[rank], _as(part, outs[rank]))
            for finish in finishes:
                finish()

        return self._hand(self._comm.all_gather(packed, out=everyone), opts, outputs, hand_out, inputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """reduce_scatter_single of each pair."""
        return SeveralWorks([self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    def _start_coalescing(self, device: object = None) -> None:
        """Operations inside the manager are posted at once; together they are waited for at its end."""
        self._gathered = []

    def _end_coalescing(self, device: object = None) -> TorchWork | None:  # type: ignore[override]  # None: no Work
        works, self._gathered = self._gathered, None
        return SeveralWorks(works) if works else None


def _as(part: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of this type and shape; copied where they are not aligned for the type."""
    if part.data_ptr() % like.element_size() or part.storage_offset() % like.element_size():
        part = part.clone()
    return part.view(like.dtype).view(like.shape)
