"""Communicator: a group of ranks and all they can do together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakValueDictionary

import numpy as np

from mpdist.algorithms import groups, hierarchical
from mpdist.algorithms.devices.joining import can_join
from mpdist.algorithms.node import make_node
from mpdist.algorithms.table import large_algorithms, ordered_algorithms
from mpdist.comm.collectives import Collectives
from mpdist.comm.groups import Groups, Joined
from mpdist.comm.objects import Objects
from mpdist.comm.straight import IPC_FROM
from mpdist.errors import DeviceFailed, UsageError
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.allocate import shape_and_type
from mpdist.memory.buffer import device_of
from mpdist.progress import current
from mpdist.progress.callback import when_done
from mpdist.progress.channel import Channel
from mpdist.progress.exporting import exports_of
from mpdist.progress.shown import showing
from mpdist.progress.work import check_timeout

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from mpdist.memory import Device
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Transport

# How many communicators have each name that a program gives. Members meet by name, so one name must not mean two.
_taken = Counter(["world"])

# By name, to be found by members that ask for its node.
_alive: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


class Communicator(Objects, Collectives, Groups):
    """A group of ranks.

    Every operation posts at once, in program order, and returns a Work: `await` it in a coroutine,
    `.wait()` where no event loop runs. Ranks are those of this communicator.

    Attributes:
        rank: this process's number, 0 to size - 1.
        size: number of members.
        name: "world", "world/split3:0", ...: the same on all members.
        ranks: the members' ranks in the world.
        allow_pickle: whether object operations are allowed.
    """

    def __init__(self, engine: Engine, transport: Transport, name: str, ranks: Sequence[int]) -> None:
        self._channel = Channel(engine, transport, name, ranks)
        if engine.roll is not None:
            self._channel.signer = engine.roll.signer(self._channel)
        if engine.on_channel is not None:
            engine.on_channel(self._channel)
        self.rank = transport.rank
        self.size = transport.size
        self.name = name
        self.ranks = tuple(ranks)
        self.allow_pickle = engine.allow_pickle
        self._reductions = {}
        self._ordered = ordered_algorithms(engine, ranks)
        self._large, self._large_from = large_algorithms(engine, ranks)
        self._is_large_unchecked = self._large is hierarchical
        self._subgroups_made = {}
        self._owner_pid = os.getpid()
        self._node: Communicator | None = None
        self._making: Joined | None = None
        _alive[name] = self

    @classmethod
    def from_mpi4py(cls, comm: object, name: str = "mpi4py") -> Communicator:
        """A communicator over the ranks of an mpi4py intracommunicator.

        It is duplicated, so this is a collective and blocking call, and the two never mix. What is pending goes on
        meanwhile. A second one of the same name is called "mpi4py#2". Close it, as any other.

        Raises:
            UsageError: before `mpdist.init()` or `mpdist.run()`.
            WorkTimeout: a member did not come within MPDIST_TIMEOUT; do not use `comm` any more.
        """
        engine = current.engine("Communicator.from_mpi4py")
        from mpdist.transport.mpi import duplicating

        def made(transport: Transport, before: int) -> Communicator:
            number = _taken[name] = before + 1
            return cls(engine, transport, f"{name}#{number}" if number > 1 else name, transport.world_ranks())

        steps = groups.adopt(engine, *duplicating(comm), made, _taken[name])
        work = engine.meeting.post_apart(Joined(engine.meeting, "from_mpi4py", steps, lambda: repr(name)))
        engine.wait(work)
        adopted: Communicator = work.result()
        return adopted

    def _member(self, transport: Transport, name: str) -> Communicator:
        return Communicator(self._channel.engine, transport, name, transport.world_ranks())

    # ------------------------------------------------------------------ who

    @property
    def local_rank(self) -> int:
        """This process's number among the members on its node."""
        return self._neighbours().index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of members on this node."""
        return len(self._neighbours())

    def _neighbours(self) -> list[int]:
        nodes = self._channel.engine.nodes
        here = nodes[self.ranks[self.rank]]
        return [rank for rank, world_rank in enumerate(self.ranks) if nodes[world_rank] == here]

    @property
    def node(self) -> Communicator:
        """The communicator of the members on this node; the first access is collective over them, and blocks.

        Ranks may access those of several communicators in any order.
        """
        if self._node is None:
            work = self._making or self._make_node()
            self._channel.engine.wait(work)
            self._node_made(work)
            work.result()
            assert self._node is not None
        return self._node

    def _make_node(self) -> Joined:
        self._channel.check_usable("node")
        neighbours = self._neighbours()
        world_ranks = [self.ranks[rank] for rank in neighbours]
        meeting = self._channel.engine.meeting
        make = self._maker(f"{self.name}/node{self.ranks[neighbours[0]]}")
        steps = make_node(meeting, world_ranks, self.name, make, _take_part)
        words = f"of '{self.name}'"
        self._making = work = Joined(meeting, "node", steps, lambda: words)
        meeting.post_apart(work)
        when_done(work, self._node_made)
        return work

    def _node_made(self, work: Joined) -> None:
        """It is made, or will not be: then the next access tries again."""
        if self._making is not work:
            return
        self._making = None
        if work._error is not None:
            return
        self._node = node = work._result
        node._is_node = True
        if self._channel.is_closed:
            node._leave("the communicator whose node it is was closed")

    @property
    def timeout(self) -> float | None:
        """Seconds a collective may take here; None: MPDIST_TIMEOUT; 0: for ever. The same on all ranks."""
        return self._channel.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        check_timeout(seconds)
        self._channel.timeout = seconds
        self._channel.engine.timeouts_changed()

    # ------------------------------------------------------------------ memory

    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[np.generic]: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32, device: str = "cpu") -> Any: ...
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32, device: str = "cpu") -> Any:
        """An array in memory that all ranks of this node can read, so that collectives copy nothing; a local call.

        It is an ordinary NumPy array, not initialised; `torch.from_numpy` makes a tensor of it. Its memory is given
        back when the last array or tensor on it goes, at any time. Where there is no shared memory left it is
        private memory, and stderr says so once.

        Args:
            device: "cuda" or "cuda:1" for a CuPy array there, which the other ranks of this node read where it is,
                if their GPUs can; its memory serves later arrays of about its size, and goes back at the end.

        Raises:
            UsageError: `shape` is none that an array can have, `dtype` no type that can be shared, or `device` no name
                of one.
            Unavailable: CuPy is not installed, or there is no such GPU.
        """
        try:
            if device != "cpu":
                return self._empty_there(device_of(device), *shape_and_type(shape, dtype))
            shared = self._channel.engine.shared
            return np.empty(*shape_and_type(shape, dtype)) if shared is None else shared.empty(shape, dtype)
        except UsageError as error:
            raise self._explained("empty", error) from error.__cause__

    def _empty_there(self, device: Device, shape: Sequence[int], dtype: np.dtype[np.generic]) -> object:
        exported = self._exported(device, shape, dtype)
        return accelerator_of(device).empty(shape, dtype) if exported is None else exported

    def _exported(self, device: Device, shape: Sequence[int], dtype: np.dtype[np.generic]) -> object | None:
        """An array that others reach; None where they cannot, or need not."""
        if prod(shape) * dtype.itemsize >= min(showing.SHOWN_FROM, *IPC_FROM.values()) and can_join(self._channel):
            with suppress(DeviceFailed):  # then it is like any other
                return exports_of(self._channel.engine, device).array(shape, dtype)
        return None

    def __repr__(self) -> str:
        state = ", closed" if self._channel.is_closed else ""
        return f"<Communicator {self._channel.where()}{state}>"


def _take_part(name: str) -> None:
    """Another member waits for the node of this communicator: it may hold up what this rank waits for."""
    comm = _alive.get(name)
    if comm is not None and comm._node is None and comm._making is None and not comm._channel.broken:
        comm._make_node()
