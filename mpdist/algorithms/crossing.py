"""Crossing: rows of what each node has, exchanged over a rail, reduced by us, and gathered.

Each node sends the others the rows that they reduce, and later its own result, so
over q nodes (q - 1) / q of the data cross each link each way: no algorithm can do
with less, and MPI's own calls send up to three times as much.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.shared.turn import Turn
from mpdist.memory import Folder, as_buffer, as_op

if TYPE_CHECKING:
    from mpdist.algorithms.cluster import Cluster
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory.elements import Array
    from mpdist.progress.collective import Steps
    from mpdist.transport.mpi import Transport


# So many slices of a rail are under way. MPI sends the pieces of all messages in turn, so of many none is over
# before all are: the way back began when the way there was over, and often only one direction of the link was busy. An
# all_reduce of 16 MiB over 2 nodes by Open MPI took 186 ms with 16 slices and 157 with 2 over 1 Gbit/s, 75 and 42
# without a limit; by MPICH 144, 144; 40, 34.
WINDOW = 2

# The largest slice that is exchanged: its second step, or its sum, can begin when it has come.
SLICE_BYTES = 512 * 1024


def crosses_in_two_steps(cluster: Cluster, how: Reduction) -> bool:
    """Whether an all_reduce over the rails is an exchange, a sum of ours and a gathering; else it is MPI's own call."""
    transport = cluster.team.channel.transport
    is_widened = how.element.is_half or how.is_compared or how.is_short
    return is_widened or transport.reduces_slowly(len(cluster.nodes))


def reduce_scatter(cluster: Cluster, rail: Transport, parts: Array, out: Array, how: Reduction) -> Steps[None]:
    """Reduce row n of all nodes' parts into out of the n-th node."""
    width = max(1, SLICE_BYTES // (parts.itemsize * rail.size))
    going: deque[tuple[Crossing, Array]] = deque()
    turn = Turn(cluster.team.channel.engine)
    for start in range(0, out.size, width):
        if len(going) == WINDOW:
            yield from _end(*going.popleft())
        rows = np.ascontiguousarray(parts[:, start : start + width])
        crossing = Crossing(cluster, rail, rows.reshape(-1), rows.shape[1], how)
        going.append((crossing, out[start : start + width]))
        if turn.is_over:
            yield turn
    while going:
        yield from _end(*going.popleft())


def _end(crossing: Crossing, target: Array) -> Steps[None]:
    yield crossing.request
    crossing.fold_into(target)


class Crossing:
    """Rows of each node's part, row r on its way to the r-th node, which reduces them.

    16-bit types cross as float32 where the parts are sums, which are rounded at the end.

    Attributes:
        request: of the exchange.
    """

    def __init__(self, cluster: Cluster, rail: Transport, part: Array, width: int, how: Reduction) -> None:
        self._how = how
        self._count = part.size
        self._width = width
        # With one rank a node the parts are inputs, and exact in 16 bits.
        is_input = all(len(members) == 1 for members in cluster.nodes) and how.op.factor is None
        is_wide = how.element.is_half and not is_input
        storage = np.dtype(np.float32 if is_wide else how.element.storage)
        sent = part
        if part.dtype != storage or part.size != rail.size * width:
            sent = np.zeros(rail.size * width, storage)
            Folder(as_op("sum"), how.element, None).fold([part], [sent[: part.size]])
        self._rows = np.empty((rail.size, width), storage)
        self.request = rail.iall_to_all(as_buffer(sent), as_buffer(self._rows))

    def fold_into(self, out: Array) -> None:
        """This node's row of the result, rounded once."""
        how = self._how
        op = as_op("sum") if how.op.factor is not None else how.op  # factors have been applied
        Folder(op, how.element, how.size).fold(list(self._rows), [out])

    def turn_back(self, rail: Transport) -> Steps[None]:
        """Reduce this node's row when all are here, and post it to the others."""
        yield self.request
        self._row = np.empty(self._width, self._how.element.storage)
        self.fold_into(self._row)
        self._whole = np.empty((rail.size, self._width), self._how.element.storage)
        self._back = rail.iall_gather(as_buffer(self._row), as_buffer(self._whole))

    def gathered(self) -> Steps[Array]:
        """All rows of the result, which has turned back."""
        yield self._back
        return self._whole.reshape(-1)[: self._count]
