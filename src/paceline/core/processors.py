"""How many processors there are to compute on."""

from __future__ import annotations

import os


def processors() -> int:
    """Those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
