"""Staging: operations on arrays that MPI cannot reach, through host memory that it can.

An operation whose arrays are on a device runs on Mirrors in their place: what it
reads is copied out before its program begins, what it writes is copied in when that
has ended, and neither the event loop nor the order of collectives notices. Where
element i of the result needs only element i of the input, an array travels in
chunks: while one is communicated the next comes from the device, and the one before
goes back.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdist.comm.mirror import Mirror, View
from mpdist.errors import UnsupportedBuffer, UsageError
from mpdist.memory import Buffer, Device, ReduceOp, as_buffer, is_same, overlap
from mpdist.memory.accelerator import accelerator_of
from mpdist.memory.cuda import DeviceFailed
from mpdist.memory.pinned import Pinned
from mpdist.progress.collective import Collective, one_call
from mpdist.progress.outbox import Outbox
from mpdist.progress.receive import Receive
from mpdist.progress.sending import send
from mpdist.progress.staged_receive import StagedReceive

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Mark
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Program, Steps, Words
    from mpdist.progress.engine import Engine
    from mpdist.progress.message import Message
    from mpdist.progress.work import Work
    from mpdist.transport.mpi import Request, Transport

# An array of more than twice this travels in chunks of this size: large enough that a chunk's copy takes much longer
# than queueing it, small enough that the first and the last, which nothing hides, cost little.
CHUNK_BYTES = 4 * 1024 * 1024

# Element i of the result needs element i of the inputs only.
_ELEMENTWISE = frozenset({"all_reduce", "broadcast", "exscan", "reduce", "scan"})


class Staging:
    """The Mirrors of one operation.

    Args:
        device: where its arrays are.
    """

    def __init__(self, engine: Engine, device: Device) -> None:
        self.pinned = pinned_of(engine, device)
        self.accelerator = self.pinned.accelerator
        self.sources: list[Mirror] = []
        self.results: list[Mirror] = []

    def mirror(self, buffer: Buffer, *, is_source: bool = False, is_result: bool = False) -> Mirror:
        """A Mirror of an array, whose copies wait for what the program has queued for it."""
        loan = self.pinned.lend(buffer.nbytes)
        mirror = Mirror(self, buffer.owner, buffer.element, buffer.shape, loan.bytes, buffer.readonly)
        mirror.loan = loan
        self.accelerator.follow(buffer)
        if is_source:
            self.sources.append(mirror)
        if is_result:
            self.results.append(mirror)
        return mirror

    def mirrored(self, x: Any, *, is_source: bool = False, is_result: bool = False) -> Any:
        """The same for an argument, an array or a list of them; the same memory has one Mirror.

        Raises:
            UsageError: what is written overlaps what was given before.
        """
        if isinstance(x, list | tuple):
            return [self.mirrored(each, is_source=is_source, is_result=is_result) for each in x]
        buffer = as_buffer(x, writable=is_result)
        for mirror in [*self.sources, *self.results] if is_result else ():
            other = as_buffer(mirror.original)
            if is_same(buffer, other):
                self.results.append(mirror)
                return mirror
            if overlap(buffer, other):
                raise UsageError("x and out overlap in memory; give out memory of its own")
        return self.mirror(buffer, is_source=is_source, is_result=is_result)

    def copy_out(self, start: int = 0, end: int | None = None) -> list[Mark]:
        """Queue copies of these elements of all sources to the host."""
        marks = []
        for mirror in self.sources:
            low, high = _bytes(mirror, start, end)
            if high > low:
                octets: Any = mirror.exporter
                marks.append(self.accelerator.copy_out(as_buffer(mirror.original), low, octets[low:high]))
        return marks

    def copy_in(self, start: int = 0, end: int | None = None) -> list[Mark]:
        """Queue copies of these elements of all results to the device."""
        marks = []
        for mirror in self.results:
            low, high = _bytes(mirror, start, end)
            if high > low:
                octets: Any = mirror.exporter
                marks.append(self.accelerator.copy_in(octets[low:high], as_buffer(mirror.original), low))
        return marks

    def run(self, op: str, program: Program, arguments: Sequence[Any], transport: Transport) -> Steps[Any]:
        """The program on Mirrors, between the copies; its result is the array on the device."""
        spans = list(self._spans(op, arguments))
        outward = [self.copy_out(*span) for span in spans]
        inward = []
        result = None
        try:
            for span, marks in zip(spans, outward, strict=True):
                yield from marks
                chunk = arguments if len(spans) == 1 else [_part_of(argument, *span) for argument in arguments]
                result = yield from program(transport, *chunk)
                inward += self.copy_in(*span)
            yield from inward
        finally:
            self.forget()
        return original_of(result)

    def forget(self) -> None:
        """Its Mirrors may go as soon as nobody else needs them."""
        self.sources.clear()
        self.results.clear()

    def _spans(self, op: str, arguments: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """From and to which element the arrays travel together."""
        mirrors = [each for each in _flat(arguments) if isinstance(each, Mirror)]
        if not mirrors:
            yield (0, 0)
            return
        count, unit = mirrors[0].count, mirrors[0].element.itemsize
        has_function = any(isinstance(each, ReduceOp) for each in arguments)  # of whole arrays
        if op not in _ELEMENTWISE or has_function or count * unit <= 2 * CHUNK_BYTES:
            yield (0, sys.maxsize)
            return
        width = CHUNK_BYTES // unit
        for start in range(0, count, width):
            yield start, min(start + width, count)


def staged(operations: Any, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of a communicator, some of whose arrays are on a device.

    Raises:
        UnsupportedBuffer: they are not all on one device.
        UsageError: what the method raises, and where the arrays overlap.
    """
    bound = _signature(method).bind(operations, *args, **kwargs)
    given = bound.arguments
    name, x, out = method.__name__.lstrip("_"), given["x"], given.get("out")
    is_root = operations.rank in (given.get("src"), given.get("dst"))
    reads = is_root or name not in ("broadcast", "scatter")
    writes = not is_root if name == "broadcast" else name == "all_reduce" and out is None
    taken = _listed(x) if reads or writes else []
    staging = Staging(operations._channel.engine, _device_of([*taken, *_listed(out)]))
    if taken:
        given["x"] = staging.mirrored(x, is_source=reads, is_result=writes)
    if out is not None:
        given["out"] = staging.mirrored(out, is_result=True)
    if isinstance(x, list | tuple):  # blocks of their own sizes are packed before anything is posted
        for mark in staging.copy_out():
            mark.wait()
        staging.sources.clear()
    view = copy.copy(operations)
    view.__class__ = _view_of(operations.__class__)
    view._channel = StagedChannel(operations, staging)
    return method(view, *bound.args[1:], **bound.kwargs)


_signature = cache(inspect.signature)


@cache
def _view_of(kind: Any) -> Any:
    """The same class for something that nobody has to close."""
    return type(kind.__name__, (kind,), {"__del__": lambda self: None})


class StagedChannel:
    """A channel as the methods of a communicator see it: what they post is staged."""

    def __init__(self, operations: Any, staging: Staging) -> None:
        object.__setattr__(self, "_operations", operations)
        object.__setattr__(self, "_staging", staging)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations._channel, name)

    def post(self, op: str, program: Program, details: Callable[[], str], *arguments: Any) -> Collective[Any]:
        real: Channel = self._operations._channel
        kept = [self._without_staging(argument) for argument in arguments]
        return real.post(op, partial(_program, self._staging, real, op, program, kept), details)

    def post_direct(
        self, op: str, words: Words, result: Any, call: Callable[..., Request], *arguments: Any, caller: int = 0
    ) -> Collective[Any]:
        describe, *rest = words
        return self.post(op, one_call, partial(describe, *rest), call, arguments, result)

    def _without_staging(self, argument: Any) -> Any:
        """Programs go on after the call, on the channel itself."""
        if argument is self:
            return self._operations._channel
        if inspect.ismethod(argument) and getattr(argument.__self__, "_channel", None) is self:
            return MethodType(argument.__func__, self._operations)
        return argument


def _program(
    staging: Staging, channel: Channel, op: str, program: Program, arguments: Sequence[Any], transport: Transport
) -> Steps[Any]:
    try:
        return (yield from staging.run(op, program, arguments, transport))
    except DeviceFailed:
        channel.give_up(f"{op} was ended by a failure of this rank's device, so its ranks may be out of step")
        raise


def pinned_of(engine: Engine, device: Device) -> Pinned:
    """The host memory for copies of a device, made for its first array.

    Raises:
        Unavailable: the library for such arrays is missing.
    """
    known = engine.staging.get(device)
    if known is None:
        shared = engine.shared

        def allocate(nbytes: int) -> Any:
            return np.empty(nbytes, np.uint8) if shared is None else shared.empty(nbytes, np.uint8)

        known = engine.staging[device] = Pinned(accelerator_of(device), allocate)
    return known


def original_of(result: Any) -> Any:
    """What the caller gets for what the operation made of Mirrors."""
    if isinstance(result, Mirror | View):
        return result.original
    if isinstance(result, list):
        return [original_of(each) for each in result]
    return result


def _bytes(mirror: Mirror, start: int, end: int | None) -> tuple[int, int]:
    unit = mirror.element.itemsize
    return start * unit, mirror.nbytes if end is None else min(end * unit, mirror.nbytes)


def _part_of(argument: Any, start: int, end: int) -> Any:
    """The same argument for a chunk."""
    if isinstance(argument, Mirror):
        return argument.part(start, end)
    return tuple(_part_of(each, start, end) for each in argument) if isinstance(argument, tuple) else argument


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _flat(argument)
        else:
            yield argument


def _listed(arrays: Any) -> list[Any]:
    if arrays is None:
        return []
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def _device_of(arrays: Sequence[Any]) -> Device:
    """Where all are.

    Raises:
        UnsupportedBuffer: on several devices.
    """
    devices = list(dict.fromkeys(as_buffer(array).device for array in arrays))
    if len(devices) > 1:
        raise UnsupportedBuffer(
            f"got arrays on {' and '.join(map(str, devices))}; all arrays of an operation must be on the same device"
        )
    return devices[0]


def send_from_device(channel: Channel, x: Buffer, dst: int, tag: int) -> Work[None]:
    """Post a message of an array on a device; the other arguments are checked."""
    if channel.broken:
        channel.refuse_call()
    staging = Staging(channel.engine, x.device)
    mirror = staging.mirror(x, is_source=True)
    for mark in staging.copy_out():
        if dst == channel.rank:  # a message to this rank is complete at once
            mark.wait()
        else:
            channel.outbox = channel.outbox or Outbox(channel)
            channel.outbox.hold(mark)
    staging.forget()
    return send(channel, mirror, dst, tag)


def receive_on_device(channel: Channel, x: Buffer, src: int, tag: int) -> Work[Message]:
    """Receive a message into an array on a device; the arguments are checked."""
    staging = Staging(channel.engine, x.device)
    mirror = staging.mirror(x)
    octets: Any = mirror.exporter

    def copy_in(nbytes: int) -> Mark:
        return staging.accelerator.copy_in(octets[:nbytes], x, 0)

    return StagedReceive(channel.inbox.receive(Receive(channel, mirror, src, tag)), copy_in, x.owner)
