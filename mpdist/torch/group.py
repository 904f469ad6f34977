"""Group: what torch reads of a process group, and what all operations share.

torch's own ProcessGroup keeps its names in C++ backends, which ours has none of: so they are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpdist.torch import profiling
from mpdist.torch.burial import bury
from mpdist.torch.device_work import CompleteThere, DeviceWork
from mpdist.torch.errors import translated
from mpdist.torch.halves import WORKS_KEPT_BY_GROUP, held, is_small
from mpdist.torch.options import is_async, seconds_of
from mpdist.torch.places import note
from mpdist.torch.registration import DEVICES, NAME
from mpdist.torch.work import DONE, Complete, Several, Waiter, Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch._C._distributed_c10d import Work as TorchWork

    from mpdist import Communicator
    from mpdist.progress.work import Work as OwnWork
    from mpdist.torch.progress import Progress

_HostWork, _DeviceWork = held(Work), held(DeviceWork)
_Complete, _CompleteThere = held(Complete), held(CompleteThere)
SeveralWorks = held(Several)


@dataclass
class GroupOptions:
    """What `backend.options` is for torch's own backends."""

    backend: str
    _timeout: timedelta
    group_name: str = ""
    global_ranks_in_group: list[int] = field(default_factory=list)


class Group(dist.ProcessGroup):
    """A process group over a Communicator: identity, life, and how a posted operation is handed to torch."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    bound_device_id: torch.device | None = None

    def __init__(self, comm: Communicator, store: Store, progress: Progress, timeout: timedelta) -> None:
        """Use a communicator of its own."""
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # the form for subclasses, unlisted
        self._comm = comm
        self._channel = comm._channel
        self._engine = comm._channel.engine
        self._progress = progress
        self._waiter = Waiter(progress, self._engine, 0.0)
        self._store = store
        self._rank = comm.rank
        self._size = comm.size
        self._name = ""
        self._description = ""
        self._kept: deque[Work] = deque(maxlen=WORKS_KEPT_BY_GROUP)
        self._gathered: list[TorchWork] | None = None  # handed out since _start_coalescing
        self._monitored = (0, 0)  # the stamp of the last monitored barrier
        self._set_default_timeout(timeout)

    # ------------------------------------------------------------------ who

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # as C++ calls them

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own is a NewType of str
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES]

    def _get_backend(self, device: torch.device) -> Group:  # type: ignore[override]  # we are our own backend
        return self

    def _id(self) -> int:
        return id(self)

    def _backend_id(self, backend_type: object = None) -> int:
        return id(self)

    def get_group_store(self) -> Store:
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Complete all collectives of this group."""
        for work in list(self._channel.collectives):
            self._waiter.wait(work)

    @property
    def options(self) -> GroupOptions:
        timeout = timedelta(seconds=self._waiter.seconds)
        return GroupOptions(NAME, timeout, self._name, list(self._comm.ranks))

    def __repr__(self) -> str:
        return f"<mpdist process group {self._name!r}, rank {self._rank} of {self._size}>"

    # ------------------------------------------------------------------ timeout, sequence numbers

    def _set_default_timeout(self, timeout: timedelta) -> None:
        seconds = max(timeout.total_seconds(), 0.0)
        self._waiter.seconds = seconds
        self._comm.timeout = seconds

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the group's start, on all ranks alike."""

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.sequence

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Close the group here; nobody is waited for."""
        bury(self._comm)

    mpdist_shutdown = shutdown

    def abort(self) -> None:
        """The same; what is pending fails."""
        self.shutdown()

    # ------------------------------------------------------------------ for all operations

    def _hand(
        self,
        posted: OwnWork[Any],
        opts: Any,
        outputs: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        inputs: Sequence[Tensor] | None = None,
        name: str = "",
    ) -> TorchWork:
        """A posted operation as torch wants it: complete, or to be waited for.

        Args:
            outputs: what a Future of it gives.
            finish: brings the results to where they belong.
            inputs: for a profiler; missing: the outputs are the inputs.
            name: for a profiler, where it is not the operation's.
        """
        event = None
        if profiling.is_enabled():
            event = profiling.begin(name or posted.op, outputs if inputs is None else inputs, self._progress)
        if posted.sequence and not posted._done:
            note(self._channel, posted)
        seconds = seconds_of(opts)
        if seconds is not None and not posted._done:
            posted.within(seconds)
        if not is_async(opts):
            self._complete(posted)
            if finish is not None:
                finish()
            if event is not None:
                event.end()
            return DONE
        kind = _HostWork if not outputs or outputs[0].is_cpu else _DeviceWork
        work = kind(self._waiter, posted, outputs, finish, event)
        if not posted._done:
            self._progress.posted(is_urgent=kind is _DeviceWork or not posted.sequence)
        if is_small(outputs):
            self._kept.append(work)
        if self._gathered is not None:
            self._gathered.append(work)
        return work

    def _complete(self, posted: OwnWork[Any]) -> None:
        """Wait, in the caller; raises what went wrong."""
        if not posted._done:
            if self._progress.is_awake or not posted.sequence:
                self._waiter.wait(posted)
            else:
                self._engine.wait(posted)
        if posted._error is not None:
            raise translated(posted._seen_error())

    def _alone(self, opts: Any, tensor: Tensor) -> TorchWork:
        """What a reduction is where this rank is the only one: nothing, but one more in the sequence."""
        self._channel.check_usable("all_reduce")
        self._channel.sequence += 1
        if profiling.is_enabled():
            event = profiling.begin("all_reduce", [tensor], self._progress)
            if event is not None:
                event.end()
        if not is_async(opts):
            return DONE
        return _Complete([tensor]) if tensor.is_cpu else _CompleteThere([tensor])
