"""Random programs of mixed operations give what a sequential reference computes.

`MPDIST_TEST_SEEDS=500` runs more of them, `MPDIST_TEST_SEED=17` one.
"""

from __future__ import annotations

import os
import random

import pytest
from comm.devices import Gpu, forget, opened
from random_programs.execution import Execution
from random_programs.programs import COLLECTIVES, GROUPS, MESSAGES, program

from mpdist import Communicator
from mpdist.comm import staging
from mpdist.config import DEVICE_OPERATIONS
from mpdist.memory import slots
from mpdist.progress import sending, wire
from mpdist.progress.shown import showing
from mpdist.transport.cuda_aware import Awareness

SEEDS = int(os.environ.get("MPDIST_TEST_SEEDS", "12"))
LENGTH = 120
# To MPI the simulated GPU's arrays are the host's; a real one's must not be given to an MPI that does not know them.
ON_ANY = ("staged", "messages straight")
WAYS = [
    *(pytest.param("simulated", way, id=way) for way in (*ON_ANY, "some given to MPI", "all ways")),
    *(pytest.param("cupy", way, id=f"cupy, {way}", marks=pytest.mark.gpu) for way in ON_ANY),
]


def seeds() -> list[int]:
    only = os.environ.get("MPDIST_TEST_SEED")
    return list(range(SEEDS)) if only is None else [int(only)]


def test_a_program_is_the_same_on_every_rank_and_has_all_kinds_of_steps() -> None:
    assert program(3, 4, 50) == program(3, 4, 50)
    kinds = {step.kind for seed in range(20) for step in program(seed, 3, LENGTH)}
    assert kinds == {*MESSAGES, *COLLECTIVES, *GROUPS, "cancel"}


@pytest.fixture(params=[False, True], ids=["whole", "pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays and objects whole, or in many small pieces."""
    if request.param:
        monkeypatch.setattr(wire, "PIECE_BYTES", 1500)
        monkeypatch.setattr(sending, "INLINE_OBJECT_BYTES", 300)
        monkeypatch.setattr(wire, "SMALL_FRAME_BYTES", 100)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(20 + 5 * SEEDS)
@pytest.mark.usefixtures("_pieces")
async def test_random_programs_agree_with_the_reference(comm: Communicator) -> None:
    await run_all(comm, seeds())


@pytest.mark.ranks(2, 3)
@pytest.mark.any_mpi
@pytest.mark.limit(20 + 10 * SEEDS)
@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize(("library", "way"), WAYS)
async def test_the_same_with_some_arrays_on_a_gpu(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, library: str, way: str
) -> None:
    if way in ("messages straight", "all ways"):
        monkeypatch.setattr(showing, "SHOWN_FROM", 0)
        monkeypatch.setattr(slots, "SLOT_BYTES", 4096)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 30)  # ranks that have theirs on the host know of no chunks
    engine = comm._channel.engine
    forget(comm)
    with opened(library, seconds=0.0001) as gpu:
        for number, seed in enumerate(seeds()[:: 6 if way == "all ways" else 4]):
            some = random.Random(f"{number} {comm.rank}").sample(DEVICE_OPERATIONS, len(DEVICE_OPERATIONS) * 2 // 3)
            monkeypatch.setattr(
                engine, "awareness", Awareness(",".join(some) if way in ("some given to MPI", "all ways") else "no")
            )
            await run_all(comm, [seed], gpu)
    forget(comm)


async def run_all(comm: Communicator, seeds: list[int], gpu: Gpu | None = None) -> None:
    for seed in seeds:
        steps = program(seed, comm.size, LENGTH)
        chance = random.Random(f"{seed} {comm.rank} waiting")
        try:
            await Execution(comm, steps, chance, gpu).run()
        except BaseException:
            print(f"MPDIST_TEST_SEED={seed} on {comm.size} ranks fails")
            raise
        assert comm._channel.unfinished() == [], f"MPDIST_TEST_SEED={seed}"
        assert comm._channel.inbox.unclaimed() == [], f"MPDIST_TEST_SEED={seed}"
        await comm.barrier()
