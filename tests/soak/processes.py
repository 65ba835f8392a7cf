"""What the processes of a server hold: memory, threads, open files. Read from /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Held:
    """Sums over a process and all that it started; memory in MB."""

    processes: int
    memory: float
    threads: int
    files: int

    def __str__(self) -> str:
        return (
            f"{self.memory:.0f} MB, {self.threads} threads, {self.files} files in "
            f"{self.processes} process{'' if self.processes == 1 else 'es'}"
        )


def tree(root: int) -> list[int]:
    """A process and its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError):
                # "pid (name) state ppid ...", where the name may hold blanks and brackets
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ones = [], [root]
    while open_ones:
        one = open_ones.pop()
        found.append(one)
        open_ones += children.get(one, [])
    return found


def held(root: int) -> Held:
    memory, threads, files, count = 0.0, 0, 0, 0
    for process in tree(root):
        place = PROC / str(process)
        with suppress(OSError):
            pages = int((place / "statm").read_text().split()[1])
            counts = len(os.listdir(place / "task")), len(os.listdir(place / "fd"))
            memory += pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            threads, files, count = threads + counts[0], files + counts[1], count + 1
    return Held(count, memory, threads, files)


def grown(rounds: Sequence[Held]) -> list[str]:
    """What is more than it was, given what was held after each round.

    Threads and files by the first and the last. Memory also goes into caches that have a bound but
    take minutes to fill (layouts of batches, the suffix tree), so its second half must be flat; a
    run of fewer than four rounds can tell only gross leaks.
    """
    findings = []
    before, after = rounds[0], rounds[-1]
    if after.processes != before.processes:
        findings.append(f"{after.processes} processes, {before.processes} before")
    # Pools of threads fill up to their size: six here, and those of the tokenizer.
    if after.threads > before.threads + 4:
        findings.append(f"{after.threads} threads, {before.threads} before")
    if after.files > before.files + 3:
        findings.append(f"{after.files} open files, {before.files} before")
    long = len(rounds) >= 4
    middle = rounds[len(rounds) // 2].memory if long else before.memory
    if after.memory > middle + (max(96.0, 0.1 * middle) if long else 512.0):
        findings.append(f"{after.memory:.0f} MB of memory, {middle:.0f} before")
    return findings
