"""GradientAverager: the same arrays, averaged over the ranks step after step, while they are still being computed.

A step has three parts. `ready(i)` copies array i into its bucket and starts the
bucket when it is full and all buckets before it have started: the order of
buckets is agreed, whatever order arrays come in. The end, `await averager` or
`averager.wait()`, starts the rest and copies the results out. The first step
only watches: its order decides the buckets.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpdist.errors import MpdistError, SizeMismatch, Unavailable, UsageError
from mpdist.gradients.agreement import agree_on_order, check_descriptions
from mpdist.gradients.bucket import Bucket, Place
from mpdist.gradients.buckets import BUCKET_BYTES, assign_buckets
from mpdist.gradients.device_bucket import DeviceBucket
from mpdist.gradients.packing import Packing, check_maker, maker_like
from mpdist.gradients.talk import Conversation, Posted, Talk
from mpdist.memory import Buffer, Device, Element, ReduceOp, as_buffer, as_op
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.heap import keep_freed
from mpdist.memory.refusals import named
from mpdist.progress.collective import take_over

if TYPE_CHECKING:
    from mpdist.comm import Communicator


# No bucket is as large.
MOST_BYTES = 2**62

Mark = tuple[int, int]
"""Number of writes to a tensor, and its address."""


class Kind(NamedTuple):
    """What may not be mixed in one bucket."""

    element: Element
    device: Device


def _kind(buffer: Buffer) -> Kind:
    return Kind(buffer.element, buffer.device)


class GradientAverager:
    """Averages a fixed list of arrays over the ranks, once per step.

    ```python
    averager = mpdist.GradientAverager(comm, gradients)
    for batch in batches:
        for i in reversed(range(len(gradients))):
            derive(gradients[i], batch)
            averager.ready(i)  # what is complete travels while the rest is computed
        await averager
    ```

    Any task may end a step that another began, as `asyncio.wait_for(averager, 60)` does, and several tasks or threads
    may wait for one end. One that was cancelled or interrupted goes on when it is asked for again. While a step is
    under way nothing else may use collectives on `comm`: give it `comm.dup()` of its own where something does. Has a
    reduction failed, the end of the step raises its error, arrays may or may not hold their average, and the next step
    begins.

    Attributes:
        order: indices of the arrays in the order of the buckets, the same on all ranks; None before it is known.
    """

    def __init__(
        self,
        comm: Communicator,
        arrays: Sequence[object],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        op: str | ReduceOp = "avg",
        compress: str | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Describe the arrays; nothing is sent.

        Args:
            comm: whose ranks take part, with arrays of the same shapes and types.
            arrays: of any library, in host memory or on a GPU, on the same kind of device on all ranks. Writable
                ones get the result; for others (JAX) it comes back new. The same are averaged in each step:
                torch's `zero_grad()` drops them, unless `set_to_none=False`, and `ready(i, p.grad)` gives new ones.
                A tensor of the host that was dropped so is warned of.
            bucket_bytes: arrays travel in groups of about this size; op, compress and this are equal on all ranks.
            op: "avg", "sum", or another reduction.
            compress: "float16" or "bfloat16" for float32 and float64 on the wire; sums accumulate in float32. Not for
                arrays on a GPU.
            names: what errors call the arrays; equal on all ranks. Missing: "array 0", ...

        Raises:
            UnsupportedBuffer: an array cannot be communicated.
            Unavailable: the library that copies from and to the array's device is missing.
            UsageError: an array can neither be written nor be made anew, the op does not fit an array's type, there is
                no such compression, or another argument is wrong.
        """
        try:
            is_size = bool(bucket_bytes >= 1)
        except (TypeError, ValueError):
            is_size = False
        if not is_size:
            raise UsageError(f"bucket_bytes is {bucket_bytes!r}; it must be a positive number")
        if hasattr(arrays, "shape"):  # the elements of a vector would be averaged into new arrays, beside it
            raise UsageError(f"arrays is {named(arrays)}; it must be a list of arrays: write [x] for a single one")
        if isinstance(arrays, Mapping):
            raise UsageError(
                f"arrays is {named(arrays)}; it must be a list of arrays: give list(arrays.values()), or the dict "
                "itself to mpdist.average()"
            )
        self._comm = comm
        keep_freed(comm._channel.engine.keep_bytes)
        self._arrays = list(arrays)
        self._names = [f"array {index}" for index in range(len(self._arrays))] if names is None else list(names)
        if len(self._names) != len(self._arrays):
            raise UsageError(
                f"got {len(self._names)} names for {len(self._arrays)} arrays; give one for each, or none at all"
            )
        self._buffers = [_described(x, name) for x, name in zip(self._arrays, self._names, strict=True)]
        for x, buffer, name in zip(self._arrays, self._buffers, self._names, strict=True):
            _check_writable(x, buffer, name)
        reduce_op = as_op(op)
        self._packings: dict[Kind, Packing] = {
            kind: Packing(kind.element, reduce_op, comm.size, compress, on_device=not kind.device.is_host)
            for kind in dict.fromkeys(map(_kind, self._buffers))
        }
        self._bucket_bytes = bucket_bytes
        about = float(min(bucket_bytes, MOST_BYTES))  # equal numbers look alike
        self._settings = f"op {reduce_op.name}, compress {compress!r}, bucket_bytes {about:.0f}"
        self._lock = threading.Lock()
        self._seen: list[int] = []
        self._is_ready = [False] * len(self._arrays)
        self.order: list[int] | None = None
        self._buckets: list[Bucket] | None = None
        self._places: list[Place] = []
        self._homes: list[Bucket] = []  # of each array
        self._marks: list[Mark | None] = [None] * len(self._arrays)  # of each tensor at the end of the last step
        self._has_warned = False
        self._started = 0
        self._agreement = Posted()
        self._results: list[Any] | None = None  # of a step whose end is not over
        self._ending: Conversation[list[Any]] | None = None  # until somebody has got the results

    def ready(self, index: int, array: object = None) -> None:
        """Say that array `index` is complete for this step; from any thread, once a step.

        Args:
            array: in place of the one given before: of the same shape and type. It is used from now on.
        """
        index = self._note(index)
        try:
            self._replace(index, self._arrays[index] if array is None else array)
            if self._buckets is not None:
                self._enter(index)
            else:
                self._follow(index)
        except BaseException:
            if self._buckets is None or not self._places[index].is_entered:
                with self._lock:
                    self._is_ready[index] = False
                    self._seen.remove(index)
            raise

    def _note(self, given: int) -> int:
        """The index of an array that is ready in this step, and was not before; raises UsageError."""
        try:
            index = operator.index(given)
        except TypeError:
            index = -1
        if not 0 <= index < len(self._arrays):
            raise UsageError(f"index is {given!r}, the arrays are 0 to {len(self._arrays) - 1}")
        with self._lock:
            if self._ending is not None and self._ending.is_over:  # nobody has got what it gave
                self._ending = None
            if self._is_ready[index]:
                self._comm._channel.check_usable("ready")
                raise UsageError(
                    f"{self._names[index]} was ready before in this step; await the averager between two steps"
                )
            self._is_ready[index] = True
            self._seen.append(index)
        return index

    def _follow(self, index: int) -> None:
        """An array of a device is copied at the end of the first step: let that wait for what is queued now."""
        buffer = self._buffers[index]
        if not buffer.device.is_host:
            accelerator_of(buffer.device).follow(buffer)

    def _replace(self, index: int, array: object) -> None:
        """Describe it again, also the same: it may lie elsewhere now, as after `tensor.data = ...`."""
        before, buffer = self._buffers[index], _described(array, self._names[index])
        if _kind(buffer) != _kind(before) or buffer.shape != before.shape:
            raise SizeMismatch(
                f"{self._names[index]} is {_text(buffer, str(buffer.device))}, "
                f"it was {_text(before, str(before.device))}; "
                "make a new GradientAverager for new shapes"
            )
        if array is not self._arrays[index]:
            self._marks[index] = None
        self._arrays[index], self._buffers[index] = array, buffer

    def _enter(self, index: int) -> None:
        """Copy the array into its bucket, unless another thread has, and start what may start."""
        place = self._places[index]
        with place.copying:
            if place.is_entered:
                return
            if self._marks[index] is not None:
                self._check_written(index, place)
            place.enter(self._buffers[index])
            with self._lock:
                place.is_entered = True
                self._homes[index].missing -= 1
                self._start_full()

    def _check_written(self, index: int, place: Place) -> None:
        """Warn, once, where a tensor is what the last step has left: it is nobody's gradient any more."""
        array, buffer = self._arrays[index], self._buffers[index]
        if _mark(array, buffer) != self._marks[index]:
            return
        last, now = np.empty(buffer.count, buffer.element.storage), buffer.array()
        place.read(last)
        if now.any() and np.array_equal(last.view("u1"), now.view("u1")):
            self._has_warned, self._marks = True, [None] * len(self._arrays)
            warnings.warn(
                f"{self._names[index]} is as the last step has left it, and is averaged again. Torch's zero_grad() "
                "makes new gradients: write zero_grad(set_to_none=False), or give them by ready(i, p.grad)",
                stacklevel=4,
            )

    def _start_full(self) -> None:
        assert self._buckets is not None
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            started = [bucket.work for bucket in self._buckets[: self._started] if bucket.work is not None]
            take_over(self._comm._channel, "all_reduce", started)  # another task may have called `ready`
            self._buckets[self._started].start(self._comm)
            self._started += 1

    # ------------------------------------------------------------------ the end of a step

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """The averaged arrays; those that can be written hold them."""
        ending = self._end()
        results = yield from ending.__await__()
        if self._ending is ending:
            self._ending = None
        return results

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The same where no event loop runs; `timeout` in seconds is for each message."""
        ending = self._end()
        results = ending.wait(timeout)
        if self._ending is ending:
            self._ending = None
        return results

    def _end(self) -> Conversation[list[Any]]:
        with self._lock:
            if self._ending is None or self._ending.is_broken_off:
                self._ending = Conversation(self.step_end)
            return self._ending

    def step_end(self) -> Talk[list[Any]]:
        """What an await does, as a talk; begun again it goes on from where it was."""
        if self._results is None:
            yield from self._averaged()
            self._results = self._collected()
        results = self._results
        if not self._has_warned:
            self._marks = [_mark(x, buffer) for x, buffer in zip(self._arrays, self._buffers, strict=True)]
        self._forget_step()
        self._results = None
        return results

    def _averaged(self) -> Talk[None]:
        """All arrays are averaged, in their buckets."""
        if self._buckets is None:
            try:
                yield from self._agree()
            except MpdistError:
                self._agreement = Posted()
                self._forget_step()
                raise
        try:
            self._enter_rest()
            with self._lock:
                self._start_full()  # what was refused before
        except MpdistError:
            self._ending = None  # and may be again
            raise
        yield from self._reduced()

    def _enter_rest(self) -> None:
        for index, place in enumerate(self._places):
            if not place.is_entered:
                self._replace(index, self._arrays[index])
                self._is_ready[index] = True
                self._enter(index)

    def _reduced(self) -> Talk[None]:
        """All reductions are over, the failed ones too: none of them uses the buckets any more."""
        assert self._buckets is not None
        failure: MpdistError | None = None
        for bucket in self._buckets:
            assert bucket.work is not None
            try:
                yield bucket.work
            except MpdistError as error:
                failure = failure or error
                if self._comm._channel.broken:  # the others may never be over; and there is no next step
                    raise failure from None
        if failure is not None:
            self._forget_step()
            raise failure

    def _agree(self) -> Talk[None]:
        """The end of the first step: compare the arrays, and make the buckets in the order of all ranks."""
        # Each rank may have its own GPU; but which arrays are on the same one must be equal.
        devices = list(dict.fromkeys(buffer.device for buffer in self._buffers))
        texts = [
            f"{name} {_text(buffer, f'device {devices.index(buffer.device)}')}"
            for name, buffer in zip(self._names, self._buffers, strict=True)
        ]
        post = self._agreement.again()
        yield from check_descriptions(self._comm, "arrays", texts, self._settings, post)
        if self.order is None:
            self.order = yield from agree_on_order(self._comm, self._seen, len(self._arrays), post)
        self._make_buckets(self.order)

    def _make_buckets(self, order: Sequence[int]) -> None:
        kinds = [_kind(buffer) for buffer in self._buffers]
        sizes = [
            buffer.count * self._packings[kind].wire.itemsize for buffer, kind in zip(self._buffers, kinds, strict=True)
        ]
        places: dict[int, tuple[Place, Bucket]] = {}
        buckets = []
        for group in assign_buckets(sizes, kinds, order, self._bucket_bytes):
            kind = kinds[group[0]]
            make = Bucket if kind.device.is_host else partial(DeviceBucket, kind.device)
            bucket = make(self._comm, self._packings[kind], [self._buffers[index] for index in group])
            buckets.append(bucket)
            places |= {index: (place, bucket) for index, place in zip(group, bucket.places, strict=True)}
        self._places = [places[index][0] for index in range(len(self._arrays))]
        self._homes = [places[index][1] for index in range(len(self._arrays))]
        self._buckets = buckets

    def _collected(self) -> list[Any]:
        """The results, copied out of the buckets."""
        try:
            for index, array in enumerate(self._arrays):
                self._replace(index, array)
        except MpdistError:  # there is nowhere to put them
            self._forget_step()
            self._ending = None
            raise
        return [
            self._leave(x, buffer, place)
            for x, buffer, place in zip(self._arrays, self._buffers, self._places, strict=True)
        ]

    def _forget_step(self) -> None:
        """No array is ready."""
        for bucket in self._buckets or ():
            bucket.reset()
        self._seen.clear()
        self._is_ready = [False] * len(self._arrays)
        self._started = 0

    def _leave(self, x: object, buffer: Buffer, place: Place) -> Any:
        if not buffer.readonly:
            place.leave(buffer)
            return x
        values = np.empty(buffer.count, buffer.element.storage)
        place.read(values)
        return maker_like(x)(values, buffer.shape)

    def __repr__(self) -> str:
        number = "not yet" if self._buckets is None else f"in {len(self._buckets)}"
        return f"<GradientAverager of {len(self._arrays)} arrays, {number} buckets, {sum(self._is_ready)} ready>"


def _described(x: object, name: str) -> Buffer:
    try:
        buffer = as_buffer(x)
        if not buffer.device.is_host:
            accelerator_of(buffer.device)
        return buffer
    except (UsageError, Unavailable) as error:
        raise type(error)(f"{name}: {error}") from error.__cause__


def _mark(x: Any, buffer: Buffer) -> Mark | None:
    """What changes when a tensor of the host is written, or gets other memory, as far as torch tells; else None."""
    try:
        writes = getattr(x, "_version", None)
    except RuntimeError:  # made in torch.inference_mode()
        return None
    return (writes, buffer.address) if type(writes) is int and buffer.device.is_host else None


def _check_writable(x: object, buffer: Buffer, name: str) -> None:
    """Or that it can be made anew."""
    if not buffer.readonly:
        return
    try:
        check_maker(x, buffer.element)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error.__cause__


def _text(buffer: Buffer, device: str) -> str:
    where = "" if buffer.device.is_host else f" on {device}"
    return f"{buffer.element.name} {tuple(buffer.shape)}{where}"
