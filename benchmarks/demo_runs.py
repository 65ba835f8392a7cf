"""`paceline demo` in many fresh processes: how far its speedups lie apart.

Half of the runs print JSON; the others are the show, through a pseudo-terminal, as a newcomer sees
it. What is reported of both: seconds of the whole command, and the speedups of the first and the
repeated requests, least, median and greatest. The speed of plain decoding stands
beside them: where that varies, others had the machine.

    python benchmarks/demo_runs.py --runs 4
    python benchmarks/demo_runs.py --runs 50 --json runs/demo.jsonl --seconds 220

Every finished run is a line of `--json`; the next call goes on. Arguments behind `--` go to the
demo.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import time
from statistics import median

from measuring import append_record, read_records

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TOTAL = re.compile(r"^ total(?: again)? +\d+ +(\d+) +\d+ +([0-9.]+)x", re.MULTILINE)
KINDS = ("json", "terminal")


Figures = list[tuple[float, float]]  # plain decoding's tokens a second, and the speedup


def _json(command: list[str]) -> Figures:
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    first = json.loads(done.stdout.strip().splitlines()[-1])
    parts = [first, *([first["repeated"]] if "repeated" in first else [])]
    return [(part["plain_tokens_per_second"], part["speedup"]) for part in parts]


def totals(shown: str) -> Figures:
    """What a terminal showed: the rows of the table that sum up."""
    text = _COLOUR.sub("", shown).replace("\r", "")
    return [(float(plain), float(times)) for plain, times in _TOTAL.findall(text)]


def _terminal(command: list[str]) -> Figures:
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 65536))
        return b"."  # instead of what was read: nothing reaches our own terminal

    os.environ |= {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        status = pty.spawn(command, read)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    shown = b"".join(parts).decode(errors="replace")
    figures = totals(shown)
    if status or not figures:
        raise SystemExit(f"error: the demo ended with status {status}:\n{shown[-2000:]}")
    return figures


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, median {median(values):.2f}"


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="begin no run that would end later")
    parser.add_argument("--json", help="file, a line a run; the next call goes on")
    parser.add_argument("rest", nargs="*", help="arguments of the demo, behind --")
    args = parser.parse_args()
    command = [sys.executable, "-m", "paceline", "demo", *args.rest]
    runs = read_records(args.json)
    began, longest = time.perf_counter(), 0.0
    while len(runs) < args.runs:
        start = time.perf_counter()
        if args.seconds is not None and start - began + longest > args.seconds:
            break
        kind = KINDS[len(runs) % 2]
        figures = (_json if kind == "json" else _terminal)(command)
        longest = max(longest, time.perf_counter() - start)
        took = time.perf_counter() - start
        runs.append(
            {"kind": kind, "seconds": round(took, 1), "speedups": [times for _, times in figures]}
            | {"plain": [round(rate, 1) for rate, _ in figures]}
        )
        append_record(args.json, runs[-1])
        shown = " and ".join(f"{times:.2f}x" for _, times in figures)
        print(f"{len(runs)}/{args.runs} {kind}: {shown}, {took:.0f} s", file=sys.stderr, flush=True)
    for kind in KINDS:
        done = [run for run in runs if run["kind"] == kind]
        if not done:
            continue
        print(f"{kind}, {len(done)} processes: {spread([run['seconds'] for run in done])} s")
        for number, name in enumerate(("first", "repeated")[: len(done[0]["speedups"])]):
            speedups, plain = ([run[key][number] for run in done] for key in ("speedups", "plain"))
            print(f"  {name} requests: {spread(speedups)}; plain tokens/s: {spread(plain)}")


if __name__ == "__main__":
    main()
