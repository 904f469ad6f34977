"""Staged calls: a method of a communicator, run on Mirrors in the place of arrays on a device.

The method itself checks and posts as ever, on a view of its communicator; what it
posts is wrapped, so that the copies are steps of the collective's own program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

from mpdist.algorithms.devices.announcing import DeviceCollective
from mpdist.comm.given import Given
from mpdist.comm.staging import Staging
from mpdist.comm.straight import give_up, is_compared, straight
from mpdist.errors import DeviceFailed, UnsupportedBuffer, UsageError
from mpdist.memory import Device, as_buffer
from mpdist.progress.collective import Collective, one_call

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Program, Steps, Words
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request


def staged(operations: Any, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of a communicator, some of whose arrays are on a device.

    Raises:
        UnsupportedBuffer: they are not all on one device.
        UsageError: what the method raises, and where the arrays overlap.
    """
    given = dict(zip(_names(method), args, strict=False)) | kwargs  # which the method has accepted
    name, x, out = method.__name__.lstrip("_"), given["x"], given.get("out")
    is_root = operations.rank in (given.get("src"), given.get("dst"))
    reads = is_root or name not in ("broadcast", "scatter")
    writes = not is_root if name == "broadcast" else name == "all_reduce" and out is None
    if name in ("reduce", "gather") and not is_root:  # there it is not looked at
        out = given["out"] = None
    taken = _listed(x) if reads or writes else []
    try:
        device = _device_of([*taken, *_listed(out)])
        staging = _staging(operations, name, device, is_even=not isinstance(x, list | tuple))
        if taken:
            given["x"] = staging.mirrored(x, is_source=reads, is_result=writes)
        if out is not None:
            given["out"] = staging.mirrored(out, is_result=True)
    except UsageError as error:
        if name == "scatter" and is_root:
            raise operations._refused_scatter(error, given["src"]) from error.__cause__
        raise
    if isinstance(x, list | tuple):  # blocks of their own sizes may be read before anything is posted
        for mark in staging.copy_out():
            mark.wait()
        staging.sources.clear()
    return method(through(operations, staging), **given)


def _staging(operations: Any, op: str, device: Device, is_even: bool) -> Staging:
    engine = operations._channel.engine
    if is_even and engine.awareness.takes(op, device):
        return Given(engine, device, operations._large_from["scatter"])
    return Staging(engine, device, is_even)


class Runs(Protocol):
    """What runs the programs of collectives between copies, as Staging does."""

    def run(self, op: str, program: Program, arguments: Sequence[Any], transport: Transport) -> Steps[Any]:
        """The program and the copies; its result."""


def through(operations: Any, staging: Runs) -> Any:
    """A view of a communicator: what is called on it is run by `staging`."""
    kind = _view_of(operations.__class__)
    view = kind.__new__(kind)
    view.__dict__.update(operations.__dict__)
    view._channel = StagedChannel(operations, staging)
    return view


@cache
def _names(method: Callable[..., Any]) -> list[str]:
    """Of its arguments, but for the communicator."""
    return list(inspect.signature(method).parameters)[1:]


@cache
def _view_of(kind: Any) -> Any:
    """The same class for something that nobody has to close."""
    return type(kind.__name__, (kind,), {"__del__": lambda self: None})


class StagedChannel:
    """A channel as the methods of a communicator see it: what they post is staged."""

    at_once = few = None

    def __init__(self, operations: Any, staging: Runs) -> None:
        self._operations = operations
        self._staging = staging

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations._channel, name)

    def post(
        self,
        op: str,
        program: Program,
        details: Callable[[], str],
        *arguments: Any,
        is_unchecked: bool | None = None,
    ) -> Collective[Any]:
        real: Channel = self._operations._channel
        if is_unchecked is None:
            is_unchecked = hasattr(program, "is_single_step")
        if is_unchecked:
            is_unchecked = not is_compared(real, op, arguments)
        kept = [self._without_staging(argument) for argument in arguments]
        steps = partial(_program, self._staging, real, op, program, kept)
        return real.post(op, steps, details, kind=DeviceCollective, is_unchecked=is_unchecked)

    def post_direct(
        self,
        op: str,
        words: Words,
        result: Any,
        call: Callable[..., Request],
        *arguments: Any,
        is_unchecked: bool | None = True,
        **_: object,
    ) -> Collective[Any]:
        describe, *rest = words
        details = partial(describe, *rest)
        return self.post(op, one_call, details, call, arguments, result, is_unchecked=bool(is_unchecked))

    def _without_staging(self, argument: Any) -> Any:
        """Programs go on after the call, on the channel itself."""
        if argument is self:
            return self._operations._channel
        if inspect.ismethod(argument) and getattr(argument.__self__, "_channel", None) is self:
            return MethodType(argument.__func__, self._operations)
        return argument


def _program(
    staging: Runs, channel: Channel, op: str, program: Program, arguments: Sequence[Any], transport: Transport
) -> Steps[Any]:
    try:
        steps = yield from straight(channel, op, arguments)
        if steps is not None:
            return (yield from steps)
        return (yield from staging.run(op, program, arguments, transport))
    except (DeviceFailed, MemoryError) as error:
        give_up(channel)
        if isinstance(error, DeviceFailed):  # a lack of memory ends any collective so, see Collective
            channel.give_up(f"{op} was ended by a failure of this rank's device, so its ranks may be out of step")
        raise


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
