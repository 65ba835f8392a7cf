"""Memory for packed weights in huge pages, where the system has them. Matrices share slabs, as many
are smaller than a page (2 MB); a slab is freed with the last matrix in it."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 32 << 20  # where nothing larger is asked for
_LINE = 64  # a matrix begins at a cache line
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


class _Slab:
    """A mapping that only its matrices keep alive, and the bytes of it that are taken."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = weakref.ref(memory)
        self.taken = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE


_lock = threading.Lock()
_last: _Slab | None = None  # the one with room


def zeros(size: int) -> torch.Tensor:
    """uint8 zeros in huge pages on Linux; torch's statistics do not count them."""
    global _last
    if _ADVICE is None or size == 0:
        return torch.zeros(size, dtype=torch.uint8)
    with _lock:
        memory = None if _last is None else _last.memory()
        if _last is None or memory is None or _last.taken + size > len(memory):
            length = max(_SLAB, -(-size // _HUGE) * _HUGE) + _HUGE
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # of a kernel without huge pages
                memory.madvise(_ADVICE)
            _last = _Slab(memory)
        first = _last.taken
        _last.taken += -(-size // _LINE) * _LINE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first)
