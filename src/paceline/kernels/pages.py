"""Memory for packed weights in huge pages, where the system has them. Matrices share slabs, as many
matrices are smaller than a huge page (2 MB). A slab is freed with the last matrix in it."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 32 << 20  # bytes of a slab, unless one matrix needs more
_LINE = 64  # bytes of a cache line, at which every matrix begins
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


class _Slab:
    """A memory mapping that only its matrices keep alive, and how many of its bytes are in use."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = weakref.ref(memory)
        self.taken = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE


_lock = threading.Lock()
_last: _Slab | None = None  # the slab with room for the next matrix


def zeros(size: int) -> torch.Tensor:
    """uint8 zeros, on Linux in huge pages. Torch's memory statistics do not count them."""
    global _last
    if _ADVICE is None or size == 0:
        return torch.zeros(size, dtype=torch.uint8)
    with _lock:
        memory = None if _last is None else _last.memory()
        if _last is None or memory is None or _last.taken + size > len(memory):
            length = max(_SLAB, -(-size // _HUGE) * _HUGE) + _HUGE
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a Linux kernel without huge pages
                memory.madvise(_ADVICE)
            _last = _Slab(memory)
        first = _last.taken
        _last.taken += -(-size // _LINE) * _LINE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first)
