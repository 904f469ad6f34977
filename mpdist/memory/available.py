"""Available: how much memory this process may still take, by the machine and by the control groups it is in.

A file in memory has no limit of its own: the system gives pages until the machine
or a group is full, and then kills a process. So whoever wants much asks here first.
The files' texts are read in one place; what they say is found by pure functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

UNLIMITED = float("inf")
# More than any machine has.
NO_LIMIT = 2**60


@dataclass(frozen=True)
class Names:
    """What the files of a control group are called, and the lines of `memory.stat` that count pages of files."""

    limit: str
    used: str
    cached: tuple[str, str]


FIRST_VERSION = Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
SECOND_VERSION = Names("memory.max", "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True)
class Group:
    """A control group that may limit memory."""

    folder: Path
    names: Names

    def limit(self) -> float:
        """Bytes that it may have; infinite if it has no limit."""
        return limit_of(_text(self.folder / self.names.limit))

    def has_room(self, nbytes: int) -> bool:
        """Whether it may take so much more; pages that only cache files make room for others."""
        left = self.limit() - int(_text(self.folder / self.names.used) or 0)
        return left >= nbytes or left + cached_bytes(_text(self.folder / "memory.stat"), self.names.cached) >= nbytes


def has_room(nbytes: int) -> bool:
    """Whether this process may take so much more memory; True where the system does not say."""
    if left_in_machine(_text(Path("/proc/meminfo"))) < nbytes:
        return False
    return all(group.has_room(nbytes) for group in _limiting_groups())


def left_in_machine(meminfo: str) -> float:
    """Bytes by the text of /proc/meminfo."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else UNLIMITED


def limit_of(text: str) -> float:
    """Bytes of a group's limit: the first version writes a very large number where there is none, the second `max`."""
    return int(text) if text.strip().isdecimal() and int(text) < NO_LIMIT else UNLIMITED


def cached_bytes(stat: str, names: tuple[str, str]) -> int:
    """What these lines of `memory.stat` count."""
    lines = dict(line.split() for line in stat.splitlines() if line.count(" ") == 1)
    return sum(int(lines.get(name, 0)) for name in names)


def groups(cgroup: str, mountinfo: str) -> list[Group]:
    """The groups that limit this process, its own and those around it.

    Args:
        cgroup: text of /proc/self/cgroup.
        mountinfo: text of /proc/self/mountinfo, which says where the groups are seen, and from which one down.
    """
    own = dict(_hierarchies(cgroup))
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.partition(" ")
        if kind == "cgroup2" and "" in own:
            found += _upwards(own[""], head, SECOND_VERSION)
        elif kind == "cgroup" and "memory" in own and "memory" in re.split(r"[ ,]", options):
            found += _upwards(own["memory"], head, FIRST_VERSION)
    return found


def _hierarchies(cgroup: str) -> list[tuple[str, str]]:
    """Controller and path of each; the controller is empty for those of the second version."""
    lines = [line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2]
    return [(controller, path) for _, controllers, path in lines for controller in controllers.split(",")]


def _upwards(path: str, mount: str, names: Names) -> list[Group]:
    """The group at `path` and all around it, up to the one that is mounted."""
    root, point = mount.split()[3:5]
    inner = PurePosixPath(path)
    # a container may see its own group as the mount's root, and the path from outside
    below = inner.relative_to(root) if inner.is_relative_to(root) else PurePosixPath()
    own = Path(point) / below.relative_to(below.anchor)
    return [Group(folder, names) for folder in (own, *list(own.parents)[: len(below.parts)])]


@cache
def _limiting_groups() -> list[Group]:
    """Those with a limit when the first one asks; most have none, and reading them takes time."""
    found = groups(_text(Path("/proc/self/cgroup")), _text(Path("/proc/self/mountinfo")))
    return [group for group in found if group.limit() < UNLIMITED]


def _text(path: Path) -> str:
    """What is in the file; nothing where it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
