"""Reducer: averages gradients while backward computes them.

    forward      expect(output): backward will enter by these tensors
    backward     ready(slot), for each parameter: its gradient goes into its bucket; a full bucket starts when all
                 buckets before it have started, so that all ranks start them in the same order
    its end      finish(): buckets that are not full start with zeros for what is missing; all are waited for

The first backward only watches in which order gradients come. At its end the ranks agree on the buckets; the same
happens when parameters were frozen or thawed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpdist.errors import ClosedError, MpdistError, WorkTimeout
from mpdist.memory.heap import keep_freed
from mpdist.progress.callback import when_done
from mpdist.torch.backward import end_backward
from mpdist.torch.compiling import is_backward_compiled, leave_alone
from mpdist.torch.data_parallel import change, communication_hook, first, mistakes, outputs, plan, running, sparse
from mpdist.torch.data_parallel.aside import Aside
from mpdist.torch.data_parallel.bucket import Bucket
from mpdist.torch.data_parallel.communication_hook import Hook
from mpdist.torch.data_parallel.ending import (
    NO_TASK,
    at_end_of_backward,
    current_task,
    is_in_backward,
    is_in_reentrant_checkpoint,
    is_whole_backward,
)
from mpdist.torch.data_parallel.gradient_hooks import GradientHooks
from mpdist.torch.data_parallel.notes import Notes
from mpdist.torch.data_parallel.overlap import Overlap
from mpdist.torch.data_parallel.slot import Slot
from mpdist.torch.data_parallel.statistics import Clock
from mpdist.torch.data_parallel.streams import Streams
from mpdist.torch.data_parallel.unused import Unused
from mpdist.torch.data_parallel.waiting import hold
from mpdist.torch.waiting import finish

if TYPE_CHECKING:
    from mpdist.comm import Communicator


class Reducer:
    """The buckets of one module, and where the running backward is.

    Attributes:
        number: counts the reducers of this process; modules in one backward end in this order.
        where: on which communicator, in words.
        slots: parameters with `requires_grad`, in the module's order.
        buckets: in the order in which they start; None until the ranks have agreed.
        is_expected: a forward was made whose backward is to be averaged.
        is_active: such a backward is running.
        step: number of backwards averaged so far.
        contributors: ranks that still have inputs.
        divisor: what the sum of gradients is divided by.
        clock: times of this step and of earlier ones.
        streams: in which gradients come; None on the CPU.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse_parameters: set[torch.Tensor],
        unused: Unused,
        bucket_bytes: int | None,
        bucket_type: type[Bucket] = Bucket,
    ) -> None:
        self.comm = comm
        self.unused = unused
        self.bucket_bytes = bucket_bytes
        self.bucket_type = bucket_type
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] | None = None
        self.is_expected = self.is_active = False
        self.step = 0
        self.contributors = comm.size
        self.divisor = float(comm.size)
        self.clock = Clock(comm.rank, comm.size)
        device = parameters[0][1].device
        self.overlap = Overlap(comm, device)
        self.streams = None if device.type == "cpu" else Streams(device)
        self.hook: Hook | None = None
        self.broken = self._empty_output = ""
        self.before_start: Callable[[], None] | None = None
        self.find_stranger: Callable[[], str | None] = lambda: None
        self._all = [
            Slot(index, name, parameter, parameter in sparse_parameters)
            for index, (name, parameter) in enumerate(parameters)
        ]
        self._hooks = GradientHooks(self._all)
        self.where = f"'{comm.name}' (rank {comm.rank})"
        self._notes: Notes | None = None
        self._former: change.Former | None = None
        self._own_notes: torch.Tensor | None = None
        self._seen: list[int] = []
        self._first: first.First | None = None
        self._aside: Aside | None = None
        self.number = next(running.numbers)
        self._started = self._forwards = 0
        self._is_closing = self._is_absent = self._has_warned = False
        self._partial = NO_TASK  # the last task for some tensors only that has come by an output
        # Derivatives were made, whose backward comes by no output: so it is expected after another one, too.
        self._has_derivatives = self._is_kept = False
        self.look_at_parameters()

    # ------------------------------------------------------------------ forward

    def look_at_parameters(self) -> None:
        """Read `requires_grad` and types again: thawed parameters get a hook, and the buckets are made anew."""
        self._hooks.be_last(self.ready)
        if not self._hooks.have_news():
            return
        has_other_hooks = self._hooks.follow(self.ready)
        has_new_types = any(
            slot.parameter.dtype != bucket.dtype for bucket in self.buckets or () for slot in bucket.slots
        )
        if not has_other_hooks and not has_new_types:
            return
        if self.buckets is not None:
            self._former = change.Former(self.buckets, self._own_notes, len(self.slots))
        self.slots = [slot for slot in self._all if slot.handle is not None]
        if not self.slots:
            self._check_parameters()
        for index, slot in enumerate(self.slots):
            slot.index = index
        self.forget_buckets()

    def _check_parameters(self) -> None:
        """Raise where all that is trained are other tensors than when the module was wrapped."""
        stranger = self.find_stranger()
        if stranger is not None:
            self._rest()
            raise mistakes.has_other_parameters(self.where, stranger)

    def forget_buckets(self) -> None:
        """Make the buckets anew at the end of the next backward."""
        self.buckets = None
        self.unused.forget()
        for slot in self._all:
            slot.bucket = slot.view = None
            slot.due = 1

    def expect(self, output: Any) -> None:
        """A forward is over, and backward will enter by its output."""
        self.prepare_for_backward()
        if self._is_kept:
            self._is_kept = self._has_derivatives = False
        self._forwards += 1
        with self._hooks.ignoring():
            entrance = outputs.watch(output, self._entered)
        if entrance is not outputs.Entrance.NONE or not self.unused.is_allowed or not self.slots or is_in_backward():
            return
        self.join_empty()  # other ranks may use parameters: no backward of this rank would tell
        self._empty_output = type(output).__name__
        self.is_expected = True  # a gradient that comes nevertheless is no local one

    def expect_nothing(self) -> None:
        """A forward in `no_sync()` is over: gradients of its backward only accumulate."""
        if self._empty_output or self._is_kept:
            self._empty_output = ""
            self.is_expected = self._is_kept = self._has_derivatives = False

    def prepare_for_backward(self, tensors: object = None) -> None:
        """Let the next backward be averaged; torch's pipelines call this after a forward in `no_sync()`."""
        self.is_expected = True
        self._empty_output = ""

    # ------------------------------------------------------------------ backward

    @leave_alone
    def _entered(self) -> None:
        """Backward has come to an output of the module.

        A task for some tensors only, as of autograd.grad(), may reach no parameter: the first gradient begins there.
        """
        if not is_whole_backward():
            self._partial = current_task()
            self._has_derivatives = self._has_derivatives or torch.is_grad_enabled()
        elif not self.is_active and self.slots:
            self.begin()

    def _begin_with(self, slot: Slot) -> None:
        """A gradient comes from a backward that has come to no output of the module."""
        if self._empty_output:
            raise mistakes.no_entrance(self.where, self._empty_output, slot.name)
        if is_in_reentrant_checkpoint():
            raise mistakes.hidden_entrance(self.where, slot.name)
        self.begin()

    def begin(self) -> None:
        """A backward that is to be averaged has begun in this thread."""
        if is_backward_compiled():
            raise mistakes.compiled_backward(self.where)
        if torch.is_grad_enabled():
            warnings.warn(
                "backward(create_graph=True) through DistributedDataParallel: the averaged gradients have no graph; "
                "take torch.autograd.grad for derivatives of derivatives",
                stacklevel=2,
            )
        self._hooks.be_last(self.ready)
        self._open(current_task())
        at_end_of_backward(self._end, self._broke_off)

    def _open(self, task: int = NO_TASK, is_absent: bool = False) -> None:
        if self.broken:
            raise ClosedError(
                f"DistributedDataParallel on {self.where} cannot be used any more: {self.broken}; close() it and wrap "
                "its .module again, on all ranks"
            )
        running.check_apart(self)
        if self.before_start is not None:
            self.before_start()
        self.is_active = True
        running.begin(self, task)
        self._is_absent = is_absent
        self.unused.begin()
        self.step += 1
        self._is_closing, self._started = False, 0
        self._seen.clear()
        self._first = None if self.buckets is not None else first.places(self)
        if self.streams is not None:
            self.streams.begin()
        for slot in self.slots:
            slot.fired = 0
            slot.is_placed = False
        for bucket in self.buckets or ():
            bucket.begin(self.divisor, self.comm.size, self.hook is not None)
        if self.buckets is not None and self.unused.is_static:
            for slot in self.slots:  # those that this rank never uses need not be waited for
                if not slot.due and slot.bucket is not None:
                    self._unfired(slot)
        self.clock.backward_begins()

    def _rest(self) -> None:
        """No backward runs."""
        self.is_active = False
        self._first = None
        running.end(self)

    @leave_alone
    def ready(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete; runs inside backward, once for each parameter, which it is given."""
        if not self.is_active:
            if not self.is_expected and current_task() != self._partial:  # no_sync(): gradients only accumulate
                self.unused.touched.add(slot)
                return
            self._begin_with(slot)
        slot.fired += 1
        if self.streams is not None:
            self.streams.note()
        if self.buckets is None:
            self._seen.append(slot.index)
            if slot.fired > 1 and not self.unused.is_static:
                raise mistakes.fired_twice(slot)
            if self._first is not None:
                self._first.take(slot)
            return
        if slot.fired != slot.due:
            if slot.fired > slot.due:
                raise mistakes.fired_twice(slot)
            return
        bucket = slot.bucket
        if bucket is None:  # sparse
            return
        if not slot.is_large and bucket.missing > 1:  # what `enter` does; most parameters are small
            bucket.missing -= 1
            bucket.late.append(slot)
            return
        with torch.no_grad():  # create_graph=True
            bucket.enter(slot)
            if not bucket.missing:
                self._start_full()

    def _start_full(self) -> None:
        buckets = self.buckets
        assert buckets is not None
        while self._started < len(buckets) and not buckets[self._started].missing:
            self._start(buckets[self._started])

    def _start(self, bucket: Bucket) -> None:
        self._started += 1
        if self.streams is None:
            self._post(bucket)
            return
        with self.streams.joined():
            self._post(bucket)

    def _post(self, bucket: Bucket) -> None:
        if bucket.is_last() and self._own_notes is None:
            self._write_notes()
        if self.hook is not None:
            communication_hook.start(self.hook, self._started_buckets(), self.where)
            return
        bucket.start(self.comm)
        assert bucket.work is not None
        when_done(bucket.work, bucket.note_end)
        if not self._is_closing:
            self.overlap.started(bucket.is_last())

    def _write_notes(self) -> None:
        assert self._notes is not None
        if self._is_absent:
            self._notes.write_absent()
            return
        missing: list[int] = []
        if self._is_closing or self.unused.is_static:  # else all gradients are here
            missing = [slot.index for slot in self.slots if not self.unused.has_gradient(slot)]
        self._notes.write(missing, self.clock.computed(), self._forwards)

    def _broke_off(self) -> None:
        """An exception ended the backward, unless it was that of this module's own end."""
        if not self.is_active:
            return
        self._rest()
        self.is_expected = self._has_derivatives = False
        if self._started:
            self.broken = (
                f"its backward number {self.step} was ended by an exception after {self._started} buckets had started, "
                "so the ranks are out of step"
            )

    # ------------------------------------------------------------------ the end of backward

    def _end(self) -> None:
        """Backward is over, for all modules in it: these end in the order in which they were wrapped.

        Each waits for the same of other ranks, where backward may have come to another module first.
        """
        if not self.is_active:
            return
        try:
            for each in running.together(self):
                each.finish()
        finally:
            if self.is_active:  # one before it has failed
                self._broke_off()

    def finish(self) -> None:
        """Backward is over: what is missing is zero; wait for all."""
        if not self._has_fired():
            self._check_parameters()
            if not self.unused.is_allowed:
                # Did only this rank reach no parameter, then the number of forwards tells in the next backward.
                self._rest()
                self.step -= 1
                return
        with torch.no_grad():
            self._close()

    def _has_fired(self) -> bool:
        return self._started > 0 or bool(self._seen) or any(slot.fired for slot in self.slots)

    def join_empty(self) -> None:
        """Take part in a backward of the others with no gradient of this rank's own."""
        with torch.no_grad():
            self._open()
            self._close()

    def join_absent(self) -> None:
        """Take part without inputs: with zeros. The others' mean comes here too, for an optimizer that has a shard."""
        self._aside = self._aside or Aside(self._all)
        with torch.no_grad():
            self._open(is_absent=True)
            self._close()

    def return_gradients(self) -> None:
        """No step of others follows: gradients are what they were when this rank's inputs ended."""
        if self._aside is not None:
            self._aside.put_back()
            self._aside = None

    def all_are_back(self) -> None:
        """Ranks that had no inputs get some again; a rank that was not there when the graph was learned learns it."""
        if self.unused.learned_of not in (0, self.comm.size):
            self.forget_buckets()

    def _unfired(self, slot: Slot) -> None:
        """A parameter without a gradient of this backward; one of an earlier backward counts on a rank with inputs."""
        assert slot.bucket is not None
        if self._is_absent or (slot.parameter.grad is None and not slot.fired):
            slot.bucket.enter_nothing(slot)
            return
        self.unused.keep(slot)
        slot.bucket.enter(slot)

    def _close(self) -> None:
        self._is_closing = True
        self.clock.backward_ends()
        try:
            self._enter_unfired()
            with self.overlap.waiting():
                self._start_full()
                self._wait()
        except MpdistError:
            raise
        except BaseException as error:  # a hook's, or what the handler of a signal has raised
            self.broken = (
                f"the end of its backward number {self.step} was interrupted by {type(error).__name__}, so the ranks "
                "may be out of step"
            )
            raise
        finally:
            self._rest()
            self.is_expected = self._is_kept = self._has_derivatives

    def _enter_unfired(self) -> None:
        if self.buckets is None:
            self._agree()
            for slot in self.slots:
                if slot.bucket is not None:
                    self._unfired(slot)
        elif self._started < len(self.buckets):
            for slot in self.slots:
                if slot.bucket is not None and slot.fired < slot.due:
                    self._unfired(slot)

    def _agree(self) -> None:
        """The first backward is over: make the buckets."""
        changed = self.comm.size
        if self._former is not None:
            changed = change.tell(self.comm, self._former, self.divisor, self.hook is not None)
        change.check(self.comm, self._all, changed, self.hook is not None)
        self._former = None
        seen = None if self._is_absent else self._seen
        left = [self.unused.is_left(slot) and not self._is_absent for slot in self._all]
        agreement = hold(plan.agree(self.comm, self.slots, seen, left, self.overlap.has_thread))
        left_over = [slot for slot, ranks in zip(self._all, agreement.left, strict=True) if ranks]
        change.average_left(self.comm, left_over, self.divisor, self._is_absent)
        self.unused.learn(self.slots, agreement.used, self.contributors, self._is_absent)
        self.buckets, self._notes, self._own_notes = plan.make_buckets(
            self.comm, self.slots, agreement, self.bucket_bytes, self.hook is not None, self.bucket_type, self._first
        )
        keep_freed(self.comm._channel.engine.keep_bytes)  # not before: a first backward frees what none after it does
        for bucket in self.buckets:
            bucket.begin(self.divisor, self.comm.size, self.hook is not None)

    def _wait(self) -> None:
        assert self.buckets is not None
        assert self._notes is not None
        if self._own_notes is not None:
            self._write_notes()
        own = None if self._own_notes is None else self.comm.all_reduce(self._own_notes)
        for bucket in self.buckets:
            if self.hook is not None:
                communication_hook.start(self.hook, self._started_buckets(), self.where)
                end_backward()  # what hooks have posted through the backend would complete after this callback
                self._wait_for_hook(bucket)
            elif bucket.work is not None:
                finish(bucket.work)
        if own is not None:
            finish(own)
        if changed := self._notes.changed():
            change.check(self.comm, self._all, changed, self.hook is not None)
        for bucket in self.buckets:
            bucket.leave()
        sparse.average_all(self.comm, self.slots, self._notes, self.divisor, self._is_absent)
        if not self._is_absent:
            self._compare_forwards(self._notes.forwards())
        self.clock.step_ends(self.buckets, self._notes.seconds())
        self.unused.settle(self.slots, self._notes, self.contributors, self._is_absent)

    def _compare_forwards(self, total: int) -> None:
        mine, self._forwards = self._forwards, 0
        if total != mine * self.contributors and not self._has_warned:
            self._has_warned = True
            warnings.warn(mistakes.uneven_forwards(self.where, mine, self.contributors, total), stacklevel=2)

    def _started_buckets(self) -> list[Bucket]:
        assert self.buckets is not None
        return self.buckets[: self._started]

    def _wait_for_hook(self, bucket: Bucket) -> None:
        assert self.hook is not None
        try:
            communication_hook.wait(self.comm, self.hook, bucket, self.where)
        except WorkTimeout:
            self.broken = f"in its backward number {self.step} a hook's Future was not complete in time"
            raise
        assert bucket.future is not None
        bucket.take(bucket.future.wait())  # done; on a device this thread's stream comes after it
        bucket.note_end()

    def let_go(self) -> None:
        """No backward is averaged any more; the memory of the buckets goes with the gradients."""
        self.remove_hooks()
        self.forget_buckets()

    def remove_hooks(self) -> None:
        """Let the parameters go."""
        self.overlap.stop()
        self._hooks.remove()
