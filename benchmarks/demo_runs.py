"""`paceline demo` in many fresh processes: how much its speedups vary.

Reports the seconds of the whole command and the speedups of the first and the repeated requests:
minimum, median and maximum. Plain decoding's speed is reported as well; if it varies, other
processes disturbed the machine.

    python benchmarks/demo_runs.py --runs 4
    python benchmarks/demo_runs.py --runs 50 --json runs/demo.jsonl --seconds 220

Every finished run is a line of `--json`; the next call continues. Arguments after `--` are those of
the demo."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

from measuring import append_record, read_records


def figures(out: str) -> dict[str, list[float]]:
    """Speedups and plain decoding's tokens per second, first and repeated, from a demo's JSON."""
    first = json.loads(out.strip().splitlines()[-1])
    parts = [first, *([first["repeated"]] if "repeated" in first else [])]
    plain = [round(part["plain_tokens_per_second"], 1) for part in parts]
    return {"speedups": [part["speedup"] for part in parts], "plain": plain}


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, median {median(values):.2f}"


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="start no run that would end later")
    parser.add_argument("--json", help="file with a line per run; the next call continues")
    parser.add_argument("rest", nargs="*", help="arguments of the demo, after --")
    args = parser.parse_args()
    command = [sys.executable, "-m", "paceline", "demo", *args.rest, "--json"]
    runs = read_records(args.json)
    began, longest = time.perf_counter(), 0.0
    while len(runs) < args.runs:
        start = time.perf_counter()
        if args.seconds is not None and start - began + longest > args.seconds:
            break
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        took = time.perf_counter() - start
        longest = max(longest, took)
        runs.append({"seconds": round(took, 1), **figures(done.stdout)})
        append_record(args.json, runs[-1])
        shown = " and ".join(f"{times:.2f}x" for times in runs[-1]["speedups"])
        print(f"{len(runs)}/{args.runs}: {shown}, {took:.0f} s", file=sys.stderr, flush=True)
    if not runs:
        return
    print(f"{len(runs)} processes: {spread([run['seconds'] for run in runs])} s")
    for number, name in enumerate(("first", "repeated")[: len(runs[0]["speedups"])]):
        speedups, plain = ([run[key][number] for run in runs] for key in ("speedups", "plain"))
        print(f"  {name} requests: {spread(speedups)}; plain tokens/s: {spread(plain)}")


if __name__ == "__main__":
    main()
