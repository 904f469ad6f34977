"""Point to point: a tensor from one rank of a group to another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpdist import ANY_SOURCE
from mpdist.torch.group import Group
from mpdist.torch.options import only
from mpdist.torch.staging import readable, writable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

Tensors = Sequence[Tensor]


class PointToPoint(Group):
    """Messages between two ranks; they are posted at once, and never wait for a collective."""

    def send(self, tensors: Tensor | Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        tensor = only(tensors, "send")
        return self._hand(self._comm.send(readable(tensor), dst, tag), None, inputs=[tensor])

    def recv(self, tensors: Tensor | Tensors, src: int, tag: int = 0) -> TorchWork:
        """Receive into a tensor, from a rank of the group."""
        return self._receive(only(tensors, "recv"), src, tag)

    def recv_anysource(self, tensors: Tensor | Tensors, tag: int = 0) -> TorchWork:
        """Receive into a tensor, from whichever rank sends first."""
        return self._receive(only(tensors, "recv"), ANY_SOURCE, tag, "recvAnySource")

    def _receive(self, tensor: Tensor, src: Any, tag: int, name: str = "") -> TorchWork:
        room, finish = writable(tensor)
        return self._hand(self._comm.recv(room, src, tag), None, [tensor], finish, name=name)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `mpdist_monitored_barrier`; torch's own function calls it under this name."""
        self.mpdist_monitored_barrier(timeout, wait_all_ranks)

    def mpdist_monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come.

        Args:
            timeout: of each rank; a number is seconds. The group's if missing.
            wait_all_ranks: name all of them, not only the first.
        """
        from mpdist.torch.monitored_barrier import monitored_barrier

        monitored_barrier(self, timeout, wait_all_ranks=wait_all_ranks)
