"""Shared by the benchmarks: runs in turns, waiting for a quiet machine, files of records.

Figures are medians over rounds in which all engines take turns, so that a machine that slows down
slows all of them. A different engine is first in each round."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from paceline.lab.bench.runner import rotated as rotated

Name = TypeVar("Name", bound=Hashable)
_STAT = Path("/proc/stat")
QUIET = 0.15  # cores that others may keep busy


def numbers(text: str) -> list[int]:
    """Parse an option such as ``1,4,16``; an empty text is an empty list."""
    return [int(part) for part in text.split(",") if part]


# -- turns ---------------------------------------------------------------------------------------


def alternate(
    runs: Mapping[Name, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[Name, list[float]]:
    """The figures that every run returned in ``rounds`` rounds, without the warm-up rounds."""
    figures: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name in rotated(list(runs), turn):
            figure = runs[name]()
            if turn >= warm_up:
                figures[name].append(figure)
    return figures


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of the ratio of two figures."""
    return median(a / b for a, b in zip(one, other, strict=True))


# -- a quiet machine -----------------------------------------------------------------------------


def _busy() -> float | None:
    """CPU seconds of all processes since the machine started; None if the system has no count."""
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _wait, *interrupts = (int(field) for field in fields)
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts[:3])) / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures how many cores other processes keep busy, from its creation on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time(), _busy()

    def cores(self) -> float | None:
        """The mean number of cores that others kept busy; None if the system has no count."""
        start, spent, before = self._began
        now, all_now = time.perf_counter(), _busy()
        if before is None or all_now is None or now <= start:
            return None
        return max(0.0, (all_now - before - (time.process_time() - spent)) / (now - start))


def wait_until_quiet(most: float, info: Callable[[str], None], window: float = 1.0) -> None:
    """Return when other processes were idle for ``window`` seconds, or after ``most`` seconds."""
    until, reported = time.perf_counter() + most, False
    while time.perf_counter() < until:
        others = OtherLoad()
        time.sleep(window)
        cores = others.cores()
        if cores is None or cores <= QUIET:
            return
        if not reported:
            info(f"waiting for a quiet machine: others keep {cores:.1f} cores busy")
            reported = True


# -- records -------------------------------------------------------------------------------------


def read_records(path: str | None) -> list[dict[str, Any]]:
    """The records of a file, one per line; an incomplete last line is skipped. An empty list if
    there is no file."""
    if path is None or not Path(path).is_file():
        return []
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def append_record(path: str | None, record: Mapping[str, Any]) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def finish(record: Mapping[str, Any], path: str | Path | None) -> None:
    """Print the record as one line of JSON, the last of the output, and write it to ``path``."""
    line = json.dumps(record)
    if path:
        Path(path).write_text(line + "\n", encoding="utf-8")
    print(line)
