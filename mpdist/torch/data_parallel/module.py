"""DistributedDataParallel: a module whose gradients are the mean over all ranks, in place of torch's.

It is a subclass of torch's class, because torch's own code asks for it
(checkpoints, pipelines, the compiler), and has nothing of its C++ reducer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpdist.errors import ClosedError, CollectiveMismatch, UsageError
from mpdist.torch.compiling import leave_alone, leave_alone_itself
from mpdist.torch.data_parallel import mistakes, options, placing, start
from mpdist.torch.data_parallel.bucket import Bucket
from mpdist.torch.data_parallel.buffers import Buffers, has_buffers
from mpdist.torch.data_parallel.ending import is_in_backward
from mpdist.torch.data_parallel.groups import own_communicator, told
from mpdist.torch.data_parallel.join import DataParallelHook, OwnJoin, Roll, authority
from mpdist.torch.data_parallel.linear import Linears
from mpdist.torch.data_parallel.own_gradients import PassingBucket
from mpdist.torch.data_parallel.plan import sizes_of_buckets
from mpdist.torch.data_parallel.reducer import Reducer
from mpdist.torch.data_parallel.sparse import sparse_parameters
from mpdist.torch.data_parallel.unused import Unused
from mpdist.torch.sync_batch_norm import synchronized_norm
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from mpdist.comm import Communicator
    from mpdist.torch.data_parallel.slot import Slot
    from mpdist.torch.data_parallel.statistics import Statistics

# torch's compiler splits backward so that its first part has gradients of this size, and refuses smaller buckets.
FIRST_BUCKET_BYTES = 1024**2


class DistributedDataParallel(TorchDataParallel):
    """A module that trains on all ranks, each with its own part of every batch.

    ```python
    model = mpdist.torch.DistributedDataParallel(model)
    ```

    After `backward()` each parameter's `grad` is the mean over the ranks, so the same optimizer step is made
    everywhere. What the options mean is what they mean in torch's class.

    Attributes:
        module: the wrapped module.
        comm: a communicator of its own: nothing else runs on it.
        bucket_bytes_cap: for the compiler, which splits a module's backward where its buckets end.
        require_backward_grad_sync: whether the next forward's backward averages; see `no_sync()`.
    """

    module: torch.nn.Module
    reducer: Reducer  # type: ignore[assignment]  # torch's class has its own there

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Communicator | dist.ProcessGroup | None = None,
        *,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: object = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        device_ids: object = None,
        output_device: object = None,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        **others: object,
    ) -> None:
        """Wrap a module; collective over the ranks of `comm`.

        Args:
            module: on the CPU or a GPU, with the same parameters in the same order on all ranks.
            comm: missing: that of `process_group`, or of torch's default group, or the world's.
            broadcast_buffers: at the start and before each forward all ranks get the buffers of rank 0.
            init_sync: compare parameters between ranks, and give all ranks those of rank 0.
            process_group: one of backend mpdist, in place of `comm`; `comm` takes it too.
            bucket_cap_mb: gradients travel in messages of about this many MiB; missing: as is best, see
                docs/data_parallel.md.
            find_unused_parameters: forwards may leave parameters out, other ones on each rank.
            gradient_as_bucket_view: False: gradients are copied out of the buckets, into the tensors that they were.
            static_graph: each backward uses the same parameters in the same way; allows reentrant checkpoints that
                share parameters.
            device_ids: None, or on a GPU a list of the module's: then forward moves its inputs there.
            output_device: None, or the same.
            device_mesh: of one dimension, in place of `process_group`.
            forward_sync_buffers: in place of `broadcast_buffers`, for forwards; the start gives buffers in any case.
            others: further options of torch's class, where they change nothing.

        Raises:
            CollectiveMismatch: parameters differ between ranks; it names them.
            UsageError: nothing to train; several devices; an option that makes no sense where the module is.
        """
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb is {bucket_cap_mb!r}; it must be positive")
        options.check(others)
        comm, process_group = told(comm, process_group, device_mesh)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        try:
            self.device = _checked(named)
            _check_alone(module, named)
        except UsageError as fault:
            if init_sync:
                start.tell(own_communicator(comm, process_group), named, fault)
            raise
        self.device_ids = placing.check_ids(self.device, device_ids, output_device)
        self.parameters_to_ignore = ignored
        self.process_group = process_group  # type: ignore[assignment]  # None where there is only a communicator
        self.comm = own_communicator(comm, process_group)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        bucket_bytes = None if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 1024**2))
        sizes = sizes_of_buckets(self.device.type == "cpu", bucket_bytes, is_hidden=True)
        self.bucket_bytes_cap = max(sizes.most, FIRST_BUCKET_BYTES)
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.device_type = self.device.type
        self.output_device = self.mixed_precision = self.logger = None
        self.dim = 0
        self._buffers_sync = Buffers(self.comm)
        self._roll = Roll(self.comm)
        self._divides_by_all = True
        self._joins_by_itself = self._others_average = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._delay_all_reduce_params: list[torch.nn.Parameter] = []
        self._delay_all_reduce_all_params = False
        try:
            if init_sync:
                has_own_buffers = not broadcast_buffers and forward_sync_buffers is None
                self._make_equal(named, [] if has_own_buffers else self._synced_buffers())
        except BaseException:
            self.comm._closed("its DistributedDataParallel was not made")
            raise
        unused = Unused(find_unused_parameters, static_graph, f"'{self.comm.name}' (rank {self.comm.rank})")
        unused.find_replaced = partial(_replaced, module)
        bucket_type = Bucket if gradient_as_bucket_view else PassingBucket
        reducer = Reducer(self.comm, named, sparse_parameters(module), unused, bucket_bytes, bucket_type)
        reducer.find_stranger = partial(_stranger, module, {id(parameter) for _, parameter in named} | ignored)
        self.reducer = reducer
        self._linears = Linears(module, reducer)
        weakref.finalize(self, _let_go, reducer, self.comm).atexit = False

    def _make_equal(self, named: list[tuple[str, torch.nn.Parameter]], buffers: list[tuple[str, torch.Tensor]]) -> None:
        """Compare the module between the ranks, and give all of them the values of rank 0."""
        start.compare(self.comm, "parameters", named)
        start.compare(self.comm, "buffers", buffers)
        start.broadcast(self.comm, [tensor for _, tensor in [*named, *buffers]], 0)

    # ------------------------------------------------------------------ forward

    @leave_alone_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._prepare(averages)
        if self.device_ids:
            inputs, kwargs = placing.brought(inputs, kwargs, self.device)
        with self._inside_ddp_forward(), self._linears if averages else nullcontext():
            output = self.module(*inputs, **kwargs)
        self._expect(averages, output)
        return output

    @leave_alone
    def _prepare(self, averages: bool) -> None:
        """What all ranks do together before a forward; nothing where a checkpoint calls it again within backward."""
        if is_in_backward():
            return
        if averages:
            if self.comm._channel.is_closed:
                raise ClosedError(
                    f"DistributedDataParallel on '{self.comm.name}' (rank {self.comm.rank}) is closed: gradients would "
                    "not be averaged; use its .module, or wrap that again"
                )
            outer = TorchDataParallel._active_ddp_module
            if outer is not None:
                _check_not_within(outer, self.reducer.slots)
        self._call_roll(averages)
        if self.require_forward_param_sync and self.broadcast_buffers and not self.comm._channel.is_closed:
            source = authority(self.comm, True) if self._join_config.enable else 0
            self._sync_module_buffers(source)

    @leave_alone
    def _expect(self, averages: bool, output: Any) -> None:
        self.require_forward_param_sync = averages
        if averages:
            if not is_in_backward():
                # Not before the forward, which reads all of them into the caches; so in a forward linear layers may
                # still have places in buckets from before a change.
                self.reducer.look_at_parameters()
            self.reducer.expect(output)
        elif torch.is_grad_enabled():
            self.reducer.expect_nothing()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if not has_buffers(self.module):
            return
        try:
            self._buffers_sync.broadcast([buffer for _, buffer in self._synced_buffers()], authoritative_rank)
        except CollectiveMismatch as error:
            raise mistakes.different_buffers(error) from error

    def _synced_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here have backwards that only accumulate gradients on this rank."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ------------------------------------------------------------------ hooks, statistics, end

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)`, which returns a Future of the reduced tensor, take the place of the mean.

        torch's hooks run: their process group must be of a backend that is initialised. Before the first backward,
        and on all ranks.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is a function of state and bucket, got {hook!r}")
        if self.reducer.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")
        self.reducer.hook = (hook, state)
        self.reducer.forget_buckets()
        self._comm_hooks.append((hook, state))

    def statistics(self, last: int | None = None) -> Statistics:
        """Where the time of the last steps went on this rank, in seconds; all remembered steps without `last`."""
        return self.reducer.clock.statistics(last)

    def close(self) -> None:
        """Let the module and its communicator go; collective. Dropping the wrapper lets the module go, unasked."""
        self.reducer.let_go()
        channel = self.comm._channel
        if channel.is_closed:
            return
        if self.reducer.broken or channel.unfinished():  # an exception ended a backward, perhaps of this rank alone
            self.comm._leave("its DistributedDataParallel was closed")
        else:
            finish(self.comm.close())

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "mpdist.torch.DistributedDataParallel holds a communicator, which cannot be pickled or copied; "
            "save or copy model.module, or save model.state_dict()"
        )

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """`with model.join():` around a loop that may have fewer steps on some ranks.

        Args:
            divide_by_initial_world_size: divide by all ranks; else by those that still have inputs.
            enable: False if inputs are known to be even.
            throw_on_early_termination: raise RuntimeError on all ranks when the first has no inputs left.
        """
        return OwnJoin(
            self, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> DataParallelHook:
        return DataParallelHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self.device
        return device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _call_roll(self, averages: bool) -> None:
        """Tell ranks that have joined that this one has not, and learn how many have."""
        if not self._join_config.enable:
            return
        if not self._joins_by_itself:
            Join.notify_join_context(self)
        ranks, _, gives_up = self._roll.call(True, averages)
        if gives_up and self._join_config.throw_on_early_termination:
            raise RuntimeError("a rank has no inputs left, and throw_on_early_termination=True: all ranks stop")
        self._set_contributors(ranks)

    def _set_contributors(self, ranks: int) -> None:
        self.reducer.contributors = ranks
        self.reducer.divisor = float(self.comm.size if self._divides_by_all else ranks)

    def _shadow_step(self) -> None:
        """What a rank without inputs does while the others make a step."""
        if not self._joins_by_itself:
            ranks, self._others_average, _ = self._roll.call(False)
            self._set_contributors(ranks)
        norm = synchronized_norm(self.module, self.comm.size)
        if norm is not None:
            raise mistakes.cannot_shadow_norm(self.reducer.where, norm)
        if self.require_forward_param_sync and self.broadcast_buffers:
            self._sync_module_buffers(authority(self.comm, False))
        self.require_forward_param_sync = self._others_average
        if self._others_average:
            self.reducer.join_absent()

    def _take_last_parameters(self, is_last_joiner: bool) -> None:
        self.reducer.return_gradients()
        self.reducer.all_are_back()
        source = authority(self.comm, is_last_joiner)
        named = self.module.named_parameters()
        tensors: list[torch.Tensor] = [tensor for name, tensor in named if name not in self.parameters_to_ignore]
        if self.broadcast_buffers:
            tensors += [tensor for _, tensor in self._synced_buffers()]
        start.broadcast(self.comm, tensors, source)

    def _left_join(self) -> None:
        self._joins_by_itself = False
        self._divides_by_all = True
        self.reducer.return_gradients()
        self._set_contributors(self.comm.size)
        self._join_config = self._join_config.construct_disabled_join_config()

    # ------------------------------------------------------------------ what torch's class has beside

    def _set_static_graph(self) -> None:
        self.static_graph = self.reducer.unused.is_static = True
        self.reducer.forget_buckets()

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]  # torch's is an attribute that it sets
        """Whether buckets are what they will be, as torch's hook with a ZeroRedundancyOptimizer asks."""
        return self.reducer.buckets is not None

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"world_size": self.comm.size, "rank": self.comm.rank, "iteration": self.reducer.step}

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward gives all ranks the buffers of rank 0."""
        return bool(self.require_forward_param_sync and self.broadcast_buffers and has_buffers(self.module))

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """statistics() knows all steps."""

    def _check_reducer_finalized(self) -> None:
        if self.reducer.is_active:
            raise RuntimeError("a backward of this module has not ended")

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _register_builtin_comm_hook(self, *args: object, **kwargs: object) -> NoReturn:
        raise options.refused_method("_register_builtin_comm_hook")

    def _register_accum_grad_hook(self, *args: object, **kwargs: object) -> NoReturn:
        raise options.refused_method("_register_accum_grad_hook")

    def _distributed_broadcast_coalesced(self, *args: object, **kwargs: object) -> NoReturn:
        raise options.refused_method("_distributed_broadcast_coalesced")

    def _register_buffer_comm_hook(self, *args: object, **kwargs: object) -> NoReturn:
        raise options.refused_method("_register_buffer_comm_hook")

    def __repr__(self) -> str:
        return f"DistributedDataParallel(over {self.comm.size} ranks of '{self.comm.name}',\n{self.module!r})"


def _stranger(module: torch.nn.Module, known: set[object]) -> str | None:
    """The first parameter that is trained, if it and all others are neither known by their id nor by their name."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if any(id(parameter) in known or name in known for name, parameter in trained):
        return None
    return trained[0][0] if trained else None


def _replaced(module: torch.nn.Module, slots: Sequence[Slot]) -> str | None:
    """The first of these names that is another tensor's now, which is trained."""
    now = dict(module.named_parameters(remove_duplicate=False))
    for slot in slots:
        found = now.get(slot.name)
        if found is not None and found is not slot.parameter and found.requires_grad:
            return slot.name
    return None


def _checked(named: list[tuple[str, torch.nn.Parameter]]) -> torch.device:
    """The device of the parameters; raises UsageError where they cannot be averaged."""
    if not any(parameter.requires_grad for _, parameter in named):
        raise UsageError("no parameter of the module requires a gradient, so there is nothing to average")
    for name, parameter in named:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} is not initialised yet: run a forward of the module before it is wrapped")
    return placing.device_of(named)


def _check_alone(module: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise where the module is wrapped already, or torch's class averages some of the same gradients."""
    trained = {id(parameter) for _, parameter in named if parameter.requires_grad}
    for name, inner in module.named_modules():
        is_torchs = isinstance(inner, TorchDataParallel) and not isinstance(inner, DistributedDataParallel)
        if is_torchs and any(id(parameter) in trained for parameter in inner.parameters()):
            raise UsageError(
                f"{name or 'the module'} is in torch's own DistributedDataParallel already, so its gradients would be "
                "averaged twice; wrap what is in it, its .module"
            )
        if isinstance(inner, DistributedDataParallel) and name in ("", "_orig_mod"):
            raise UsageError("the module is wrapped in DistributedDataParallel already; use that, or wrap its .module")


def _check_not_within(outer: TorchDataParallel, slots: Sequence[Slot]) -> None:
    """Raise where torch's class, whose forward this one is in, averages some of the same gradients."""
    if isinstance(outer, DistributedDataParallel):
        return
    ignored = outer.parameters_to_ignore
    theirs = {id(parameter) for name, parameter in outer.module.named_parameters() if name not in ignored}
    both = next((slot.name for slot in slots if id(slot.parameter) in theirs), None)
    if both is not None:
        raise UsageError(
            f"{both} is in mpdist's DistributedDataParallel, and that in torch's own, so its gradient would be "
            "averaged twice; take one of them, or let torch's ignore these parameters: "
            "_set_params_and_buffers_to_ignore_for_model()"
        )


def _let_go(reducer: Reducer, comm: Communicator) -> None:
    reducer.let_go()
    if comm._channel.broken and not comm._channel.is_closed:
        comm._closed("its DistributedDataParallel is gone")
    comm._drop()
