"""Doorbell: a thread that sleeps when the bells are closed by another wakes, and hears of no closed file."""

from __future__ import annotations

import mmap
import select
import socket
from collections.abc import Callable

import pytest

from mpdist.progress import doorbell
from mpdist.progress.doorbell import DatagramDoorbell


def made(kind: type[socket.socket] = socket.socket) -> DatagramDoorbell:
    """A bell for a world of one rank, which nobody rings."""
    bell = kind(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    return DatagramDoorbell(0, mmap.mmap(-1, 2), [bell], [b""], [])


def test_a_nap_ends_with_nobody_to_ring() -> None:
    bell = made()
    assert not bell.nap(0.001, lambda: False)
    bell.close()


def test_bells_closed_at_the_last_look_end_a_nap() -> None:
    bell = made()

    def closes() -> bool:
        bell.close()
        return False

    assert not bell.nap(0.001, closes)


@pytest.mark.parametrize("limit", [0, doorbell.SELECTABLE])
def test_bells_closed_before_the_system_is_asked_end_a_nap(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    bell = made()
    wait: Callable[[int, float], bool] = doorbell._has_come
    monkeypatch.setattr(doorbell, "SELECTABLE", limit)

    def closed_before(fd: int, seconds: float) -> bool:
        bell.close()
        return wait(fd, seconds)

    monkeypatch.setattr(doorbell, "_has_come", closed_before)
    assert bell.nap(60.0, lambda: False)


def test_bells_closed_while_rings_are_forgotten_end_a_nap() -> None:
    class Closing(socket.socket):
        """Closed by another thread at the first look into it."""

        def recv(self, *args: int) -> bytes:
            bell.close()
            return super().recv(*args)

    bell = made(Closing)
    assert not bell.nap(0.001, lambda: False)
    assert bell.fileno() == -1


def test_another_error_of_the_system_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = made()

    def fails(*_: object) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr(select, "select", fails)
    with pytest.raises(OSError, match="out of memory"):
        bell.nap(0.001, lambda: False)
    bell.close()
