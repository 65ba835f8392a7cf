"""``make soak``: a server under everything that clients do, for half an hour or SECONDS.

    SECONDS=60 make soak
    PYTHONPATH=tests python -m soak --seconds 300 --model FOLDER --draft ngram --draft suffix

Exit code 1 if the server did anything wrong; the seed that is printed repeats the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from soak.judge import SHOWN, Judge
from soak.storm import ACTS, Plan, Storm
from support.served_process import ServedProcess

EMBEDDED = "paceline/tiny"
DRAFTS = ("paceline/tiny-draft", "ngram", "suffix", "eagle3:paceline/tiny-eagle3", "recycling")
OTHERS = ("ngram", "suffix", "recycling", "lookahead")  # for any model
# Freed memory goes back to the system at once: what still grows has not been freed.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


def arguments_of(model: str, drafts: Sequence[str], extra: Sequence[str]) -> list[str]:
    """float32: the text of a request is then the same in every batch, to the last token.

    The embedded model gets so little cache that sequences are preempted.
    """
    chosen = drafts or (DRAFTS if model == EMBEDDED else OTHERS)
    small = ["--kv-cache-memory", "24M"] if model == EMBEDDED else []
    given = [part for draft in chosen for part in ("--draft", draft)]
    limits = ["--max-batch-size", "12", "--drain-seconds", "5", "--log-level", "warning"]
    return [model, *given, "--dtype", "float32", *small, *limits, *extra]


def soak(plan: Plan, arguments: Sequence[str], say: Callable[[str], None]) -> Judge:
    """Start a server, let the clients loose, stop it; the judge knows what was wrong."""
    with ServedProcess(arguments, MEMORY) as process:
        storm = Storm(plan, process, say)
        try:
            asyncio.run(storm.run())
        except (OSError, EOFError, ValueError) as error:
            storm.judge.complain(f"the server could not be asked: {error!r}")
        judge = storm.judge
        if process.process.poll() is not None:
            judge.complain(f"the server ended by itself: exit code {process.process.returncode}")
        process.process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code != 0:
            judge.complain(f"exit code {code} after SIGTERM")
    for error, number in Counter(tracebacks(process.errors)).most_common():
        judge.complain(f"{number} tracebacks in the log that end in: {error[:300]}")
    return judge


def tracebacks(log: Sequence[str]) -> Iterator[str]:
    """The last line of each: the error."""
    inside = False
    for line in log:
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            inside = False
            yield line.strip()


def summary(judge: Judge, plan: Plan, seconds: float) -> list[str]:
    counts = dict(sorted(judge.counts.items()))
    lines = [
        f"soak of {seconds:.0f} s, {plan.clients} clients, seed {plan.seed}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items()),
        f"{judge.tokens} tokens compared with those decoded alone",
    ]
    lines += [f"FINDING {found}" for found in judge.findings[:SHOWN]]
    if len(judge.findings) > SHOWN:
        lines.append(f"... and {len(judge.findings) - SHOWN} more")
    lines.append("nothing found" if not judge.findings else f"{len(judge.findings)} findings")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--model", default=EMBEDDED, help="a folder, or a built-in name")
    parser.add_argument("--draft", action="append", default=[], help="repeatable")
    parser.add_argument("--serve", action="append", default=[], help="a further flag of serve")
    parser.add_argument("--skip", default="", help=f"of {','.join(ACTS)}")
    parser.add_argument("--round", type=float, default=300.0, help="seconds between two looks")
    given = parser.parse_args()
    skip = frozenset(given.skip.split(","))
    plan = Plan(given.seed, given.seconds, given.clients, skip, given.round)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    print(f"soak: {given.seconds:.0f} s, seed {given.seed}", flush=True)
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)

    judge = soak(plan, arguments_of(given.model, given.draft, given.serve), say)
    print("\n".join(summary(judge, plan, time.monotonic() - begin)))
    return 1 if judge.findings else 0


if __name__ == "__main__":
    sys.exit(main())
