"""How busy others keep the machine: what is timed beside them is worth little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
QUIET = 0.15  # cores that others may keep busy


def _busy() -> float | None:
    """Processor seconds of everybody since the machine started; None where nothing tells."""
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
        ticks = [int(field) for field in fields]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _wait, *interrupts = ticks
    return (user + nice + system + sum(interrupts[:3])) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Cores that other processes kept busy since ``start``."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float | None]:
        return time.perf_counter(), time.process_time(), _busy()

    def cores(self) -> float | None:
        """None where the system does not say."""
        (start, own, all_then), (now, own_now, all_now) = self._began, self._now()
        if all_then is None or all_now is None or now <= start:
            return None
        return max(0.0, (all_now - all_then - (own_now - own)) / (now - start))


def wait_until_quiet(most: float, say: Callable[[str], None], window: float = 1.0) -> None:
    """Return when others leave the machine alone for ``window`` seconds, or after ``most``."""
    until, told = time.perf_counter() + most, False
    while time.perf_counter() < until:
        others = Neighbours()
        time.sleep(window)
        cores = others.cores()
        if cores is None or cores <= QUIET:
            return
        if not told:
            say(f"waiting for a quiet machine: others keep {cores:.1f} cores busy")
            told = True
