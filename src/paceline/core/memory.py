"""How much memory a device has, and what this process holds of it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now: of a GPU, or of main memory within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not MemFree: what the system keeps of files is given up when it is asked for.
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    free = int(kilobytes) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, and a model would count twice."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)


def held_memory() -> int | None:
    """Bytes of main memory that this process holds now; None where that cannot be told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = next((line.split()[1] for line in lines.splitlines() if line.startswith("VmRSS")), None)
    return None if found is None else int(found) * 1024
