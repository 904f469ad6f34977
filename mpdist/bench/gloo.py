"""torch.distributed's gloo backend, as what mpdist is compared with; loaded only when asked for.

It meets on a TCP store of its own, on localhost where all ranks are on one node.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpdist.bench.case import GLOO
from mpdist.bench.contenders import Arrays, Bound, as_run
from mpdist.bench.operations import Operation, partner

if TYPE_CHECKING:
    from mpdist.transport.raw import Raw

SECONDS = timedelta(seconds=120)


def is_installed() -> bool:
    """Whether torch is there; it is not loaded."""
    return importlib.util.find_spec("torch") is not None


class Gloo:
    """torch.distributed over gloo, between the ranks of the world."""

    name = GLOO
    is_resident = False

    def __init__(self, raw: Raw, nodes: int) -> None:
        torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        torch.set_num_threads(1)
        host = "127.0.0.1" if nodes == 1 else raw.from_first(socket.gethostname())
        if nodes == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        if raw.rank == 0:  # the others learn the port only when it is there, so it must not wait for them
            store = distributed.TCPStore(host, 0, raw.size, True, SECONDS, wait_for_workers=False)
        port = raw.from_first(store.port if store else 0)
        if store is None:
            store = distributed.TCPStore(host, port, raw.size, False, SECONDS)
        distributed.init_process_group("gloo", store=store, rank=raw.rank, world_size=raw.size)
        self.torch = torch
        self.distributed = distributed
        self.rank, self.size = raw.rank, raw.size

    def bind(self, op: Operation, arrays: Arrays) -> Bound:
        """gloo reduces in place, so its result is in x."""
        x = None if arrays.x is None else self.torch.from_numpy(arrays.x)
        out = None if arrays.out is None else self.torch.from_numpy(arrays.out)
        if op.name == "ping_pong":
            return Bound(as_run(self._ping_pong(x, out)), arrays.x, arrays.out)
        is_in_place = arrays.out is None or op.name == "reduce"
        step = self._step(op.name, x, out)
        roots = self.size if op.is_rooted else 1

        def run(count: int) -> None:
            for number in range(count):
                step(number % roots)

        return Bound(as_run(run), arrays.x, arrays.x if is_in_place else arrays.out)

    def _step(self, op: str, x: Any, out: Any) -> Callable[[int], Any]:
        """One call; the argument is the root, ignored where there is none."""
        d, rank = self.distributed, self.rank
        # torch 2.13 renamed them
        all_gather = getattr(d, "all_gather_single", None) or d.all_gather_into_tensor
        reduce_scatter = getattr(d, "reduce_scatter_single", None) or d.reduce_scatter_tensor
        outs = list(out.chunk(self.size)) if op == "gather" else []
        xs = list(x.chunk(self.size)) if op == "scatter" else []
        steps: dict[str, Callable[[int], Any]] = {
            "barrier": lambda _: d.barrier(),
            "all_reduce": lambda _: d.all_reduce(x),
            "reduce_scatter": lambda _: reduce_scatter(out, x),
            "all_gather": lambda _: all_gather(out, x),
            "all_to_all": lambda _: d.all_to_all_single(out, x),
            "broadcast": lambda root: d.broadcast(x, root),
            "reduce": lambda root: d.reduce(x, root),
            "gather": lambda root: d.gather(x, outs if rank == root else None, root),
            "scatter": lambda root: d.scatter(out, xs if rank == root else None, root),
        }
        return steps[op]

    def _ping_pong(self, x: Any, out: Any) -> Callable[[int], None]:
        send, recv = self.distributed.send, self.distributed.recv
        other = partner(self.rank, self.size)

        def play(count: int) -> None:
            if other is None:
                return
            for _ in range(count):
                if self.rank < other:
                    send(x, other)
                    recv(out, other)
                else:
                    recv(out, other)
                    send(x, other)

        return play

    def close(self) -> None:
        self.distributed.destroy_process_group()
