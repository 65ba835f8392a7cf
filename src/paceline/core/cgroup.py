"""Limits of Linux' control groups, versions 2 and 1: memory and processors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """Bytes until the nearest limit of the process's groups; None without a limit. Page cache of
    inactive files counts as free."""
    left = []
    for version, folder in _folders("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (number_after(words_of(folder / name)) for name in names[:2])
        if limit is not None and used is not None and limit < 1 << 60:  # version 1's "no limit"
            cached = number_after(words_of(folder / "memory.stat"), names[2])
            left.append(limit - used + (cached or 0))
    return max(0, min(left)) if left else None


def processors() -> int:
    """Processors the process may use: its affinity, within the quota of its groups."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for version, folder in _folders("cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in words_of(folder / name)]
        quota, period = number_after(words), number_after(words[1:])
        if quota and period:
            count = min(count, math.ceil(quota / period))
    return max(1, count)


def _folders(controller: str) -> Iterator[tuple[int, Path]]:
    """The folders of the process's group and its parents, each with its version."""
    try:
        lines = _SELF.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        version = 1 if names else 2
        mount = ROOT / controller if version == 1 else ROOT
        # In a container the path may be the host's while the mount is the group itself.
        inner = mount / path.lstrip("/")
        yield from (
            (version, folder) for folder in (inner, *inner.parents) if mount in folder.parents
        )
        yield version, mount


def words_of(file: Path) -> list[str]:
    """The words in a file; [] if it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def number_after(words: Sequence[str], name: str | None = None) -> int | None:
    """The number after ``name``, or the first; None if there is none."""
    index = 0 if name is None else words.index(name) + 1 if name in words else len(words)
    return int(words[index]) if index < len(words) and words[index].isdigit() else None
