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
    from mpdist.transport.mpi import Request, Transport

_END_SECONDS = 0.5

_left: list[object] = []
"""What was not complete at the end; MPI may still read it."""


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
        """Complete the sends, and take what others still send until all have come here.

        UCX warns of letters that nobody has taken. What can't be completed is left as it is.
        """
        end = time.monotonic() + _END_SECONDS
        everyone: Request | None = None
        while time.monotonic() < end:
            for _ in self.received():
                pass
            self.settle()
            if not self._sending and everyone is None:
                everyone = self._transport.ibarrier()
            if everyone is not None and everyone.Test():
                break
            time.sleep(0.001)
        for _ in self.received():
            pass
        _left.extend([*self._sending, everyone])
