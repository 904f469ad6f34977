"""`mpdist run` over two hosts of two ranks each, which are made of namespaces on this machine.

Needs root, iproute2 and the tool `fakecluster`, whose path is in MPDIST_FAKECLUSTER:
`fakecluster [--name NAME] up N | exec HOST -- COMMAND | down`, with its state in FAKECLUSTER_DIR.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli.jobs import PROMISED_SECONDS, START_SECONDS, job_environ
from runtime.programs import FAILING, IS_OPENMPI

TOOL = os.environ.get("MPDIST_FAKECLUSTER", "")
NAME = "hosts"
HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
ON_SECOND_HOST = 3


def _reason() -> str:
    """Why the tests cannot run here."""
    if not TOOL:
        return "MPDIST_FAKECLUSTER does not say where the tool is"
    if not os.access(TOOL, os.X_OK):
        return f"MPDIST_FAKECLUSTER={TOOL!r} is not a program"
    if os.geteuid() != 0:
        return "making hosts needs root"
    return "" if shutil.which("ip") else "making hosts needs iproute2"


pytestmark = [
    pytest.mark.job,
    pytest.mark.limit(120),
    pytest.mark.skipif(bool(_reason()), reason=_reason() or "can run"),
]


@dataclass
class Cluster:
    """Hosts that are up."""

    folder: Path

    def call(self, *words: str) -> None:
        subprocess.run([TOOL, "--name", NAME, *words], env=self.environ(), check=True, timeout=60, capture_output=True)

    def environ(self) -> dict[str, str]:
        return job_environ() | {"FAKECLUSTER_DIR": str(self.folder)}

    @property
    def prefix(self) -> str:
        """First three bytes of all addresses."""
        return str(json.loads((self.folder / NAME / "state.json").read_text())["prefix"])

    def hostfile(self) -> str:
        line = "{} slots={}\n" if IS_OPENMPI else "{}:{}\n"
        path = self.folder / "hostfile"
        path.write_text("".join(line.format(f"h{number}", RANKS_PER_HOST) for number in range(HOSTS)))
        return str(path)

    def launcher_options(self) -> list[str]:
        agent, network = str(self.folder / NAME / "agent"), f"{self.prefix}.0/24"
        if not IS_OPENMPI:
            return ["-localhost", f"{self.prefix}.254", "-launcher", "ssh", "-launcher-exec", agent]
        prte = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", network]
        return ["--map-by", f"ppr:{RANKS_PER_HOST}:node:OVERSUBSCRIBE", "--bind-to", "none", *prte]

    def mpi_variables(self) -> dict[str, str]:
        """Ranks of a host talk by shared memory, others by the link between the hosts."""
        if not IS_OPENMPI:
            return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
        return {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": f"{self.prefix}.0/24",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def run(self, *program: str) -> tuple[int, str, str, float]:
        """A job on all hosts: status, output, errors, seconds from when all ranks were ready."""
        options = [f"--launcher-arg={word}" for word in self.launcher_options()]
        command = [sys.executable, "-m", "mpdist", "run", "-n", str(RANKS), "--hostfile", self.hostfile(), *options]
        process = subprocess.Popen(
            [TOOL, "--name", NAME, "exec", "head", "--", *command, *program],
            env=self.environ() | self.mpi_variables() | {"MPDIST_TEST_FAILING": str(ON_SECOND_HOST)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout
        out, ready = "", time.monotonic()
        for line in process.stdout:
            out += line
            if "is ready" in line:
                ready = time.monotonic()
        err = process.communicate(timeout=START_SECONDS)[1]
        return process.returncode, out, err, time.monotonic() - ready


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("hosts"))
    cluster.call("up", str(HOSTS))
    try:
        yield cluster
    finally:
        cluster.call("down")


def test_job_runs_over_both_hosts(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "adds.py"
    script.write_text(
        """
import socket
import mpdist, numpy as np

async def main(world):
    x = np.full(100_000, world.rank + 1.0)
    await world.all_reduce(x)
    message = await world.sendrecv(x, (world.rank + 1) % world.size, src=(world.rank - 1) % world.size)
    print(socket.gethostname(), world.local_size, x[-1], message.data[0], flush=True)

mpdist.run(main)
"""
    )
    status, out, err, _ = cluster.run(str(script))
    assert (status, err) == (0, "")
    total = RANKS * (RANKS + 1) / 2
    expected = [f"h{host} {RANKS_PER_HOST} {total} {total}" for host in range(HOSTS) for _ in range(RANKS_PER_HOST)]
    # UCX warns on stdout of letters that were on their way when the job ended.
    assert sorted(line for line in out.splitlines() if "UCX  WARN" not in line) == expected


@pytest.mark.parametrize("where", ["recv", "idle"])
@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("exception", 1, r"ValueError: boom; the job is stopped"),
        ("sysexit3", 3, r"sys.exit\(3\); the job is stopped"),
        ("sigkill", 137, r"was killed by SIGKILL"),
        ("sigsegv", 139, r"was killed by SIGSEGV"),
    ],
)
def test_failure_on_the_second_host_ends_the_job(
    cluster: Cluster, how: str, status: int, reason: str, where: str
) -> None:
    ended, out, err, seconds = cluster.run(FAILING, how, where, "run")
    assert out.count("is ready") == RANKS, err
    assert ended == status, err
    lines = [line.strip(" \0") for line in err.splitlines()]  # prterun ends some of its messages with a NUL
    named = [line for line in lines if line.startswith("mpdist: ")]
    assert len(named) == 1, err
    assert re.match(rf"mpdist: rank {ON_SECOND_HOST} of {RANKS} \(host h1, pid \d+\).*{reason}", named[0])
    assert seconds < PROMISED_SECONDS
