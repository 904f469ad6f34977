"""Given: a collective whose arrays MPI may get as they are, in the memory of a device.

A single call of MPI gets the addresses on the device, when the program's stream has come
to where the collective was called; everything else is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpdist.comm.mirror import Mirror
from mpdist.comm.staging import Staging, original_of, part_of
from mpdist.comm.ways import Way, way
from mpdist.progress.marks import Attended, copied

if TYPE_CHECKING:
    from mpdist.memory import Buffer, Device
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.mark import Mark
    from mpdist.progress.collective import Program, Steps
    from mpdist.progress.engine import Engine
    from mpdist.transport.mpi import Transport


class Given(Staging):
    """The Mirrors of one operation."""

    def __init__(self, engine: Engine, device: Device, scatter_limit: int) -> None:
        super().__init__(engine, device)
        self._engine = engine
        self._device = device
        self._scatter_limit = scatter_limit
        self._ready: list[Mark] = []

    def mirror(self, buffer: Buffer, *, is_source: bool = False, is_result: bool = False) -> Mirror:
        mirror = super().mirror(buffer, is_source=is_source, is_result=is_result)
        self._ready.append(self.accelerator.ready(buffer))
        return mirror

    def run(self, op: str, program: Program, arguments: Sequence[Any], transport: Transport) -> Steps[Any]:
        """The program on the arrays themselves, in the chunks in which other ranks may stage theirs."""
        if way(op, program, arguments, self._takes, self._scatter_limit) is Way.STAGED:
            return (yield from super().run(op, program, arguments, transport))
        for mirror in [*self.sources, *self.results]:
            mirror.give()
        spans = list(self._spans(op, arguments))
        result = None
        try:
            yield from copied(self._ready)
            for span in spans:
                self._engine.attend(self.accelerator)
                chunk = arguments if len(spans) == 1 else [part_of(argument, *span) for argument in arguments]
                result = yield from attended(program(transport, *chunk), self.accelerator)
        finally:
            self.forget()
        return original_of(result)

    def _takes(self, op: str) -> bool:
        return self._engine.awareness.takes(op, self._device)


def attended(steps: Steps[Any], accelerator: Accelerator) -> Steps[Any]:
    """The steps of a program, whose requests may be tested in any thread."""
    while True:
        try:
            request = next(steps)
        except StopIteration as stop:
            return stop.value
        yield Attended(request, accelerator)
