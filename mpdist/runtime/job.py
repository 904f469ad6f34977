"""Job: one rank's life, from MPI's start to the agreement that all have finished."""

from __future__ import annotations

import os

from mpdist.comm import Communicator
from mpdist.config import Config
from mpdist.progress import current
from mpdist.progress.backoff import policy
from mpdist.progress.channel import Channel
from mpdist.progress.doorbell import SilentDoorbell, connect
from mpdist.progress.engine import Engine

_world: Communicator | None = None


def init() -> Communicator:
    global _world
    if _world is not None:
        return _world
    from mpdist.transport import mpi

    config = Config.read()
    transport = mpi.start()
    node = transport.split_node()
    nodes = transport.all_gather_now(min(node.world_ranks()))
    doorbell = connect(transport, node) if transport.size > 1 else SilentDoorbell(1)
    engine = Engine(policy(node.size, len(os.sched_getaffinity(0))), doorbell)
    engine.nodes = nodes
    engine.is_threaded = mpi.is_threaded()
    engine.allow_pickle = config.allow_pickle
    engine.meeting = Channel(engine, transport.dup(), "meeting", range(transport.size))
    current.set_engine(engine)
    _world = Communicator(engine, transport, "world", transport.world_ranks())
    return _world


def finalize() -> None:
    """Placeholder until the final agreement is there."""
    from mpdist.transport import mpi

    global _world
    if _world is not None:
        _world.barrier().wait()
        _world = None
        current.set_engine(None)
        mpi.stop()


def run(main, *args):  # type: ignore[no-untyped-def]
    import asyncio

    world = init()
    result = asyncio.run(main(world, *args))
    finalize()
    return result
