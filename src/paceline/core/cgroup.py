"""What a container or a service may use of the machine: Linux' control groups, versions 2 and 1."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """Bytes until the nearest limit of the process's groups; None where there is none.

    The page cache of files that nobody reads any more counts as free: the system gives it up
    before the limit.
    """
    left = []
    for version, folder in _folders("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None and limit < 1 << 60:  # version 1's "no limit"
            left.append(limit - used + _counted(folder / "memory.stat", names[2]))
    return max(0, min(left)) if left else None


def processors() -> int:
    """Processors that the process may use: its affinity, within the quota of its groups."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for version, folder in _folders("cpu"):
        if version == 2:
            quota, period = _numbers(folder / "cpu.max")
        else:
            quota = _number(folder / "cpu.cfs_quota_us")
            period = _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            count = min(count, math.ceil(quota / period))
    return max(1, count)


def _folders(controller: str) -> Iterator[tuple[int, Path]]:
    """The process's group and those that it is in, with the version of each."""
    try:
        lines = _MINE.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        version = 1 if names else 2
        mount = ROOT / controller if version == 1 else ROOT
        # In a container the path may be the host's, and the mount the group itself.
        inner = mount / path.lstrip("/")
        yield from (
            (version, folder) for folder in (inner, *inner.parents) if mount in folder.parents
        )
        yield version, mount


def _numbers(file: Path) -> tuple[int | None, int | None]:
    try:
        words = file.read_text(encoding="ascii").split()
    except OSError:
        return None, None
    first, second = (*words, "", "")[:2]
    return _as_number(first), _as_number(second)


def _number(file: Path) -> int | None:
    return _numbers(file)[0]


def _as_number(word: str) -> int | None:
    return int(word) if word.lstrip("-").isdigit() else None  # "max"


def _counted(file: Path, name: str) -> int:
    """An entry of a file of lines "name number"; 0 if it has none."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
