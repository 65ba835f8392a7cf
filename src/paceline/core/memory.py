"""Memory of a device, and of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

from paceline.core.cgroup import memory_left, number_after, processors, words_of


def free_memory(device: torch.device) -> int:
    """Free bytes: of a GPU, or of main memory within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not MemFree: page cache is given up on demand.
    kilobytes = number_after(words_of(Path("/proc/meminfo")), "MemAvailable:")
    if kilobytes is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return kilobytes * 1024 if left is None else min(kilobytes * 1024, left)


@lru_cache(maxsize=1)
def limit_threads() -> None:
    """At most as many torch threads as the process may use processors: torch counts the machine's,
    not the container's. OMP_NUM_THREADS overrides it."""
    allowed = processors()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)


def trim() -> None:
    """Return freed memory to the system, which glibc keeps otherwise."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)


def held_memory() -> int | None:
    """Bytes of main memory that this process uses; None if unknown."""
    kilobytes = number_after(words_of(Path("/proc/self/status")), "VmRSS:")
    return None if kilobytes is None else kilobytes * 1024
