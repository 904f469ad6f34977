"""Mail: small messages between the control threads, on a communicator of their own.

Each message is a JSON record of at most a few KB. Sends are kept until MPI is done with
them. Nobody waits: a rank that does not receive holds no other up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport
    from mpdist.transport.requests import Request

_END_SECONDS = 0.5

_left: list[object] = []
"""Sends that were not complete at the end; MPI may still read them."""


class Mail:
    """This rank's letters. Used by one thread."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._sending: list[tuple[Request, bytes]] = []

    def send(self, rank: int, record: dict[str, Any]) -> None:
        """Post a record."""
        letter = json.dumps(record).encode()
        request = self._transport.isend([letter, len(letter), self._transport.byte], rank, 0)
        self._sending.append((request, letter))

    def received(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What has come: sender and record."""
        transport = self._transport
        while True:
            message = transport.improbe(transport.any_source, transport.any_tag, transport.status)
            if message is None:
                return
            sender, nbytes = transport.status.source, transport.status.count
            letter = bytearray(nbytes)
            message.Recv([letter, nbytes, transport.byte])
            yield sender, json.loads(letter)

    def settle(self) -> None:
        """Forget the sends that are complete."""
        self._sending = [(request, letter) for request, letter in self._sending if not request.Test()]

    def close(self) -> None:
        """Complete the sends, and take what others have sent; those that can't be completed are left as they are.

        No barrier: a rank that comes late would leave a pending one to MPI's end, which Open MPI may not survive.
        """
        end = time.monotonic() + _END_SECONDS
        while self._sending and time.monotonic() < end:
            self.settle()
            time.sleep(0.001)
        for _ in self.received():
            pass
        _left.extend(self._sending)
