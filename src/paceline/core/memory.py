"""Free memory of a device, memory of this process, and the limits of Linux control groups (versions
2 and 1) on memory and processors. torch is imported only where it is needed."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Parse ``512M``, ``1.5GiB``, ``2 GB`` (powers of 1024) or bytes. Raises ConfigError."""
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        size = int(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size; write 512M or 2G") from None
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size above 0")
    return size


CGROUPS = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """Bytes that the process may still use before it reaches a limit of its control groups; None
    without a limit. Page cache of inactive files counts as free."""
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
    """Number of processors the process may use: its affinity, within its control groups' quota."""
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
    """The folders of the process's control group and its parents, each with the cgroup version."""
    try:
        lines = _SELF.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        version = 1 if names else 2
        mount = CGROUPS / controller if version == 1 else CGROUPS
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
    """The number that follows ``name``, or the first word; None if it is no number."""
    index = 0 if name is None else words.index(name) + 1 if name in words else len(words)
    return int(words[index]) if index < len(words) and words[index].isdigit() else None


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of main memory within the container's limit."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    # Not MemFree, because the system gives up page cache on demand.
    kilobytes = number_after(words_of(Path("/proc/meminfo")), "MemAvailable:")
    if kilobytes is None:  # macOS reports only the total
        known = [name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names]
        return os.sysconf(known[0]) * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return kilobytes * 1024 if left is None else min(kilobytes * 1024, left)


@lru_cache(maxsize=1)
def limit_threads() -> None:
    """Limit torch's threads to the processors the process may use: torch counts those of the
    machine, not of the container. OMP_NUM_THREADS overrides this."""
    import torch

    allowed = processors()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)


def trim() -> None:
    """Return freed memory to the system; glibc would keep it."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def held_memory(excluding: Collection[str] = ()) -> int | None:
    """Resident memory of this process in bytes, without the pages of the mapped files ``excluding``
    (real paths); None if unknown."""
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    kilobytes, excluded = 0, False
    for line in lines:
        if not line[0].isupper():  # a line of addresses and the file name begins a mapping
            excluded = line.split(maxsplit=5)[-1] in excluding
        elif line.startswith("Rss:") and not excluded:
            kilobytes += int(line.split()[1])
    return kilobytes * 1024
