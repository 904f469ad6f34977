"""Meeting: ranks of a test come together without a collective."""

from __future__ import annotations

from mpdist import Communicator


async def met(comm: Communicator) -> None:
    """All have come, by messages: a collective of another communicator may have the place of the one looked for."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for rank in others:
        await comm.send(b"", rank, 9)
    for rank in others:
        await comm.recv(src=rank, tag=9)
