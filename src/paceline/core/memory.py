"""How much memory a device has, and what this process holds of it."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

from paceline.core.cgroup import memory_left, number_after, processors, words_of


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now: of a GPU, or of main memory within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not MemFree: what the system keeps of files is given up when it is asked for.
    kilobytes = number_after(words_of(Path("/proc/meminfo")), "MemAvailable:")
    if kilobytes is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return kilobytes * 1024 if left is None else min(kilobytes * 1024, left)


@lru_cache(maxsize=1)
def limit_threads() -> None:
    """No more threads than the process may use processors: torch counts the machine's, and in a
    container with ``--cpus=2`` 64 threads would take turns. OMP_NUM_THREADS says otherwise."""
    allowed = processors()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, and a model would count twice."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)


def held_memory() -> int | None:
    """Bytes of main memory that this process holds now; None where that cannot be told."""
    kilobytes = number_after(words_of(Path("/proc/self/status")), "VmRSS:")
    return None if kilobytes is None else kilobytes * 1024
