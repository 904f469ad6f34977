"""Collectives: reductions, and what moves tensors between all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpdist.errors import InvalidRank
from mpdist.torch import sparse, uneven
from mpdist.torch.devices import is_served
from mpdist.torch.errors import WrongCall
from mpdist.torch.group import Group, SeveralWorks
from mpdist.torch.options import is_async, only, only_list, root_of
from mpdist.torch.reductions import Reduction, name_of, reduce_op, reduction_of
from mpdist.torch.staging import Finish, as_bytes, check_output, is_known, joined, readable, room_for, writable
from mpdist.torch.work import Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

Tensors = Sequence[Tensor]

_STRIDED = torch.strided


class Collectives(Group):
    """Operations of all ranks of the group on tensors; named as torch 2.13 names them."""

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Tensor | Tensors, opts: Any = None, timeout: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks, in place."""
        tensor = only(tensors, "all_reduce")
        op = reduce_op(opts)
        if tensor.layout is not _STRIDED:
            return sparse.all_reduce(self, tensor, op, opts)
        name = name_of(op, tensor.dtype)
        if self._size == 1 and type(name) is str and is_known(tensor.dtype) and is_served(tensor):
            return self._alone(opts, tensor)
        if name is not None and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return self._hand(self._comm.all_reduce(tensor, name), opts, [tensor])
        room, finish = writable(tensor, keeps=True)
        return self._reduce_in(room, op, opts, [tensor], finish)

    def _reduce_in(self, room: Tensor, op: Any, opts: Any, outputs: Tensors, finish: Finish | None) -> TorchWork:
        """All-reduce contiguous memory; then what brings it to where it belongs."""
        reduction = reduction_of(op, outputs[0].dtype)  # not that of the room, which may be bytes
        posted = self._comm.all_reduce(room, reduction.op)
        return self._hand(posted, opts, outputs, self._after(reduction.then, room, finish))

    def _after(self, then: Any, room: Tensor, finish: Finish | None) -> Finish | None:
        """What is to be done with a result: the rest of the reduction, then bringing it home."""
        if then is None:
            return finish

        def both() -> None:
            then(room.detach(), self._size)
            if finish is not None:
                finish()

        return both

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduce several tensors as one."""
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise WrongCall("all_reduce_coalesced takes tensors of one type: tensors must all have the same type")
        room, finish = room_for(tensors)
        if finish is not None:
            room.copy_(joined(tensors))
        return self._reduce_in(room, reduce_op(opts), opts, tensors, finish)

    def reduce(self, tensors: Tensor | Tensors, opts: Any = None, op: Any = None) -> TorchWork:  # type: ignore[override]  # one for all forms
        """Reduce a tensor over all ranks into that of the root; the others' stay as they are."""
        tensor, root = only(tensors, "reduce"), root_of(opts)
        reduction = reduction_of(reduce_op(opts if op is None else op), tensor.dtype)
        x = readable(tensor)
        if self._rank != root:
            return self._hand(self._comm.reduce(x, root, reduction.op), opts, [tensor])
        check_output(tensor)
        total = x.new_empty(x.shape)
        posted = self._comm.reduce(x, root, reduction.op, out=total)
        bring_home = uneven.bringing(total, tensor)
        return self._hand(posted, opts, [tensor], self._after(reduction.then, total, bring_home))

    def reduce_scatter(self, outputs: Tensor | Tensors, inputs: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]  # one for all forms
        """Reduce a list of tensors, one for each rank, whose sizes may differ; each rank keeps its own."""
        out = only(outputs, "reduce_scatter")
        blocks = only_list(inputs, "reduce_scatter", self._size)
        reduction = _scatter_reduction(opts, out, blocks)
        if len({block.numel() for block in blocks}) == 1:
            return self._scatter_sum(out, joined(blocks), reduction, opts, blocks)
        room, finish = writable(out)
        sources = [uneven.apart(readable(block), room) for block in blocks]
        posted = self._comm.reduce_scatter(sources, reduction.op, out=room)
        return self._hand(posted, opts, [out], self._after(reduction.then, room, finish), blocks)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        """The same, of one tensor, `size` times as large as the output."""
        reduction = _scatter_reduction(opts, output, [input])
        return self._scatter_sum(output, readable(input), reduction, opts, [input])

    def _scatter_sum(self, out: Tensor, x: Tensor, reduction: Reduction, opts: Any, inputs: Tensors) -> TorchWork:
        room, finish = writable(out)
        x = uneven.apart(x, room)
        posted = self._comm.reduce_scatter(x, reduction.op, out=room)
        return self._hand(posted, opts, [out], self._after(reduction.then, room, finish), inputs)

    # ------------------------------------------------------------------ moving

    def broadcast(self, tensors: Tensor | Tensors, opts: Any = None, timeout: Any = None) -> TorchWork:
        """Copy the root's tensor into those of all others."""
        tensor, root = only(tensors, "broadcast"), root_of(opts)
        if self._rank == root:
            return self._hand(self._comm.broadcast(readable(tensor), root), opts, [tensor])
        room, finish = writable(tensor)
        return self._hand(self._comm.broadcast(room, root), opts, [tensor], finish)

    def allgather(self, output_lists: Any, inputs: Tensor | Tensors, opts: Any = None) -> TorchWork:
        """Collect each rank's tensor in a list; their sizes may differ."""
        outs = only_list(output_lists, "all_gather", self._size)
        tensor = only(inputs, "all_gather")
        uneven.check_block(outs[self._rank], tensor, self._rank)
        if len({out.numel() for out in outs}) > 1:
            return uneven.all_gather(self, outs, tensor, opts)
        room, finish = room_for(outs)
        return self._gather_into(room, tensor, opts, outs, finish)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        """Collect each rank's tensor in one tensor."""
        room, finish = writable(output)
        return self._gather_into(room, input, opts, [output], finish)

    def _gather_into(
        self, room: Tensor, tensor: Tensor, opts: Any, outputs: Tensors, finish: Finish | None
    ) -> TorchWork:
        x = as_bytes(readable(tensor))
        if uneven.overlaps(x, room):  # in place, as FSDP does it
            x = x.clone()
        return self._hand(self._comm.all_gather(x, out=room), opts, outputs, finish, [tensor])

    def gather(self, output_lists: Any, inputs: Tensor | Tensors, opts: Any = None) -> TorchWork:  # type: ignore[override]  # one for all forms
        """Collect each rank's tensor in a list on the root; their sizes may differ."""
        tensor, root = only(inputs, "gather"), self._root("gather", "dst", opts)
        outs = only_list(output_lists, "gather", self._size) if self._rank == root else []
        return uneven.gather(self, outs, tensor, root, opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        """Collect each rank's tensor in one tensor on the root; what the others give for it is not looked at."""
        x, root = as_bytes(readable(input)), root_of(opts)
        if self._rank != root:
            return self._hand(self._comm.gather(x, root), opts, (), None, [input])
        room, finish = writable(output)
        x = uneven.apart(x, room)
        return self._hand(self._comm.gather(x, root, out=room), opts, [output], finish, [input])

    def scatter(self, outputs: Tensor | Tensors, input_lists: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]  # one for all forms
        """Hand the root's list of tensors out; their sizes may differ."""
        out, root = only(outputs, "scatter"), self._root("scatter", "src", opts)
        blocks = only_list(input_lists, "scatter", self._size) if self._rank == root else []
        return uneven.scatter(self, out, blocks, root, opts)

    def _root(self, op: str, what: str, opts: Any) -> int:
        """The root, where no operation of the communicator looks at it; raises InvalidRank."""
        try:
            return self._comm._rank(root_of(opts), what)
        except InvalidRank as error:
            raise self._comm._explained(op, error) from None

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> TorchWork:
        """Send slices of the input along axis 0 to all ranks; all ranks give sizes, or none does and they are even."""
        if output_split_sizes or input_split_sizes:
            check_output(output)  # whole: slices of one element overlap only each other
            received = uneven.slices(output, output_split_sizes, self._size, "output")
            sent = uneven.slices(input, input_split_sizes, self._size, "input")
            return uneven.all_to_all(self, received, sent, opts, [output], [input])
        uneven.even_length(output, self._size, "output")
        room, finish = writable(output)
        x = readable(input)
        x = uneven.apart(x, room)
        return self._hand(self._comm.all_to_all(x, out=room), opts, [output], finish, [input])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Send a list of tensors, one to each rank; their sizes may differ."""
        received = only_list(outputs, "all_to_all", self._size)
        sent = only_list(inputs, "all_to_all", self._size)
        return uneven.all_to_all(self, received, sent, opts, outputs, inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> TorchWork:  # type: ignore[override]  # one for all forms
        """Done when all ranks have called it, and what this one has posted before is done."""
        if not self._channel.collectives:
            return self._hand(self._comm.barrier(), opts)
        if not is_async(opts):
            self._wait_for_pending_works()
            return self._hand(self._comm.barrier(), opts)
        earlier = [Work(self._waiter, posted, ()) for posted in list(self._channel.collectives)]
        return SeveralWorks([*earlier, self._hand(self._comm.barrier(), opts)])


def _scatter_reduction(opts: Any, out: Tensor, inputs: Tensors) -> Reduction:
    """How blocks are reduced into `out`. Their types are compared here: of bytes nobody could tell them."""
    for tensor in inputs:
        if tensor.dtype is not out.dtype:
            raise WrongCall(f"reduce_scatter: x is {tensor.dtype}, out is {out.dtype}; they must be of the same type")
    return reduction_of(reduce_op(opts), out.dtype)
