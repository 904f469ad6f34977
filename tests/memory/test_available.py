"""Available: what the system's files say about memory that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpdist.memory.available import (
    FIRST_VERSION,
    SECOND_VERSION,
    UNLIMITED,
    Group,
    Names,
    groups,
    has_room,
    left_in_machine,
    limit_of,
)

MEMINFO = "MemTotal:       24684276 kB\nMemFree:         100 kB\nMemAvailable:    2048 kB\n"
FIRST_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
SECOND_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
CONTAINERS_MOUNT = FIRST_MOUNT.replace(" / ", " /docker/12 ")
OTHER_MOUNT = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def test_what_the_machine_has_left_is_read() -> None:
    assert left_in_machine(MEMINFO) == 2048 * 1024
    assert left_in_machine("") == UNLIMITED


@pytest.mark.parametrize(
    ("text", "limit"), [("800\n", 800), ("max\n", UNLIMITED), ("9223372036854771712\n", UNLIMITED), ("", UNLIMITED)]
)
def test_a_limit_may_be_none(text: str, limit: float) -> None:
    assert limit_of(text) == limit


@pytest.mark.parametrize("names", [FIRST_VERSION, SECOND_VERSION])
def test_a_group_has_room_for_what_its_limit_leaves_and_for_what_only_caches_files(
    tmp_path: Path, names: Names
) -> None:
    inactive, active = names.cached
    (tmp_path / names.limit).write_text("1000\n")
    (tmp_path / names.used).write_text("900\n")
    (tmp_path / "memory.stat").write_text(f"anon 300\n{inactive} 40\n{active} 7\nshmem 553\n")
    group = Group(tmp_path, names)
    assert group.has_room(147)
    assert not group.has_room(148)
    (tmp_path / names.limit).write_text("max")
    assert group.has_room(10**15)


def test_a_group_that_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert Group(tmp_path / "gone", SECOND_VERSION).has_room(10**15)


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "folders"),
    [
        ("0::/user/job\n", SECOND_MOUNT, ["/sys/fs/cgroup/user/job", "/sys/fs/cgroup/user", "/sys/fs/cgroup"]),
        ("0::/\n", SECOND_MOUNT, ["/sys/fs/cgroup"]),
        (
            "9:name=systemd:/\n4:memory:/job\n1:cpu,cpuacct:/else\n0::/\n",
            f"{OTHER_MOUNT}\n{FIRST_MOUNT}\n",
            ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"],
        ),
        # a container that sees its own group as the root, and its path from outside or from inside
        ("4:memory:/docker/12\n", CONTAINERS_MOUNT, ["/sys/fs/cgroup/memory"]),
        ("4:memory:/docker/12/a\n", CONTAINERS_MOUNT, ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"]),
        ("4:memory:/\n", CONTAINERS_MOUNT, ["/sys/fs/cgroup/memory"]),
        ("", FIRST_MOUNT, []),
        ("4:memory:/job\n", "", []),
    ],
)
def test_groups_are_found_from_the_own_one_upwards(cgroup: str, mountinfo: str, folders: list[str]) -> None:
    assert [str(group.folder) for group in groups(cgroup, mountinfo)] == folders


def test_each_version_has_its_own_names() -> None:
    both = groups("4:memory:/\n0::/\n", f"{FIRST_MOUNT}\n{SECOND_MOUNT}\n")
    assert [group.names for group in both] == [FIRST_VERSION, SECOND_VERSION]


def test_this_machine_has_room_for_a_byte_but_not_for_everything() -> None:
    assert has_room(1)
    if Path("/proc/meminfo").exists():
        assert not has_room(2**62)
