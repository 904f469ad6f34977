"""Marks: waiting for a device, as a step of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mpdist.errors import DeviceFailed

if TYPE_CHECKING:
    from mpdist.memory.accelerator import Accelerator
    from mpdist.memory.mark import Mark
    from mpdist.progress.collective import Steps
    from mpdist.transport.requests import Request


@contextmanager
def settled(*queued: Sequence[Mark]) -> Iterator[None]:
    """An error inside waits for these copies, which still read and write, before it goes on."""
    try:
        yield
    except BaseException:
        for mark in [mark for marks in queued for mark in marks]:
            with suppress(DeviceFailed):
                mark.wait()
        raise


def copied(marks: Sequence[Mark]) -> Steps[None]:
    """Done when the copies are; a failure is raised here, where the program sees it, and not by the request."""
    for mark in marks:
        copy = _Copy(mark)
        yield copy
        if copy.error is not None:
            raise copy.error


class _Copy:
    error: DeviceFailed | None = None

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def Test(self) -> bool:
        try:
            return self._mark.Test()
        except DeviceFailed as error:
            self.error = error
            return True


class Attended:
    """A request of MPI for a device's memory; or a Mark, after which the same thread calls MPI.

    It is tested in threads that use the device; in any, where that has failed: MPI is not done with it before.
    """

    __slots__ = ("_accelerator", "_request")

    def __init__(self, request: Request, accelerator: Accelerator) -> None:
        self._request = request
        self._accelerator = accelerator

    def Test(self) -> bool:
        with suppress(DeviceFailed):
            self._accelerator.attend()
        return self._request.Test()
