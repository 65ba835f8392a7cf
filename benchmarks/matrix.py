"""Never slower, cell by cell: every drafter, batch size and temperature, from a fresh process.

A cell is a drafter at a batch size and a temperature. Each of its rounds builds new LLMs over the
same weights (a controller, drafter and cache without any history) and lets plain decoding and
"auto" decode the same prompts: a batch of requests that begin together, prefill included,
``--tokens`` new tokens each. They take turns of a tenth of a second, each on a clock of its own, so
that the machine's moods meet them alike. Other rounds have other prompts and the other order. What
start-up measures is not timed, but told. A figure is the median over rounds of auto's tokens a
second by plain decoding's, and so for the first 32 tokens of every request, those up to ``--after``
and those behind it. ``--spec control=none`` is plain decoding twice: what the noise is.

With --fixed "auto" is held against plain decoding and all fixed lengths, behind ``--after`` tokens.

    python benchmarks/never_slower.py --matrix --pair tiny --json matrix.json
    python benchmarks/never_slower.py --matrix --pair FOLDER --drafters ngram,suffix --batches 8,1
    python benchmarks/never_slower.py --matrix --pairs smollm2 --drafters eagle3 --batches 1,4,16
    python benchmarks/never_slower.py --matrix --fixed --pair inflated --seconds 1200 --json f.json

Cells come in the order given: temperatures, then batches, then drafters. The file of --json is
written after each round, and a later call with the same settings goes on from it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import drafters as drafter_bench
import inflate
import real
from entrants import PLAIN, Entry, Weights, entries, skip_option
from matrix_figures import AUTO, as_report, cell_line, summary
from neighbours import Neighbours, wait_until_quiet
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.tools.report.terminal import print_report
from prompts import default_folder, mixed
from report import machine
from waves import Contestant, Run, together

EARLY = 32  # tokens of a request: the first figure
LENGTHS = (1, 2, 3, 4, 6, 8)
WARM_UP = 4  # tokens that plain decoding writes before anything counts: kernels, lazy imports


@dataclass(frozen=True)
class Cell:
    """A drafter at a batch size and a temperature."""

    drafter: str
    batch: int
    temperature: float

    @property
    def key(self) -> str:
        return f"{self.drafter}/b{self.batch}/t{self.temperature:g}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--matrix", action="store_true", help="this form of the benchmark")
    parser.add_argument("--fixed", action="store_true", help="against all fixed lengths")
    parser.add_argument("--quick", action="store_true", help="two rounds of fewer tokens")
    parser.add_argument(
        "--pair",
        "--pairs",
        default="tiny",
        help=f"tiny, inflated, {real.NAME}, or a model's folder",
    )
    parser.add_argument("--target", help=f"folder of {real.NAME}")
    real.add_weights(parser)
    parser.add_argument("--prompts-dir", default=str(default_folder()), help=f"of {real.NAME}")
    parser.add_argument("--suites", help=f"of {real.NAME}; default: all of them")
    parser.add_argument("--drafters", help="names of rows of drafters.py; default: all there are")
    parser.add_argument(
        "--spec", action="append", default=[], metavar="NAME=SPEC", help="one more drafter"
    )
    parser.add_argument("--batches", default="1,4,8,16,32")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--lengths", help="with --fixed; default 1,2,3,4,6,8")
    parser.add_argument("--rounds", type=int, help="default 5, quick: 2")
    parser.add_argument("--tokens", type=int, help="of a request; default 256, --fixed 320")
    parser.add_argument("--after", type=int, help="where the last figure begins; default 200")
    parser.add_argument("--requests", type=int, default=1, help="of a round, in waves of a batch")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", help="a file in place of the shipped prompts")
    parser.add_argument("--seconds", type=float, help="begin no round after so many seconds")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds to wait for a quiet machine, a round"
    )
    parser.add_argument("--json", help="file for all rounds; what is in it is not measured again")
    parser.add_argument("--report", help=".md or .html file for the tables")
    args = parser.parse_args(arguments)
    args.batches = [int(part) for part in args.batches.split(",")]
    args.temperatures = [float(part) for part in args.temperatures.split(",")]
    args.lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else list(LENGTHS)
    args.rounds = (2 if args.quick else 5) if args.rounds is None else args.rounds
    if args.after is None:
        args.after = 48 if args.quick else 200
    if args.tokens is None:
        args.tokens = 96 if args.quick else (320 if args.fixed else 256)
    if min([*args.batches, *args.lengths, args.rounds, args.tokens, args.requests]) < 1:
        parser.error("--batches, --lengths, --rounds, --tokens, --requests must be at least 1")
    if args.fixed and args.tokens <= args.after:
        parser.error(f"--fixed looks behind {args.after} tokens; use more --tokens or less --after")
    if args.pair == real.NAME and args.prompts:
        parser.error(f"{real.NAME} has prompts of its own; choose with --suites, --prompts-dir")
    if any("=" not in spec for spec in args.spec):
        parser.error("--spec is NAME=SPEC, such as mine=ngram:min=2")
    return args


def pair_of(args: argparse.Namespace) -> tuple[str, list[Entry]]:
    """The target and its drafters: those of drafters.py, or, of a folder, what needs no weights."""
    if args.pair in drafter_bench.MODELS:
        names = drafter_bench.parse([])
        weights = drafter_bench.weights_of(args.pair, names)
        skip = ""
        if args.pair == "inflated":
            layers = (
                drafter_bench.read_layers(names.target),
                drafter_bench.read_layers(weights.target),
            )
            skip = skip_option(*layers)
        found = entries(weights, skip)
    elif args.pair == real.NAME:
        folders = {kind: real.find(kind, getattr(args, kind)) for kind in real.DRAFTS}
        weights = Weights(str(real.target_folder(args.target)), **folders)
        found = entries(weights)
    else:
        weights = Weights(str(inflate.resolve(args.pair)))
        found = [*entries(weights), Entry("hybrid", "hybrid:suffix+ngram", 8)]
    rows = {entry.name: entry for entry in found if entry.spec and entry.name != PLAIN}
    for text in args.spec:
        name, _, spec = text.partition("=")
        rows[name] = Entry(name, spec)
    more = [text.partition("=")[0] for text in args.spec]
    wanted = [*args.drafters.split(","), *more] if args.drafters else list(rows)
    if unknown := [name for name in wanted if name not in rows]:
        raise SystemExit(f"error: no drafter {unknown[0]!r}; there are {', '.join(rows)}")
    return weights.target, [rows[name] for name in dict.fromkeys(wanted)]


class Bench:
    """Measures into ``rounds``, by cell; what was measured survives Ctrl-C and a later call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.perf_counter()
        self.model, self.entries = pair_of(args)
        self.specs = {entry.name: entry.spec for entry in self.entries}
        self.settings = self._settings()
        self.rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._resume()
        self.say(f"loading {args.pair}")
        self.base = LLM(self.model, dtype=args.dtype, max_batch_size=1, draft_length=0)
        self.ends = self.base.end_tokens if args.pair == real.NAME else frozenset[int]()
        self.prompts = self._prompts()
        self._warm: set[int] = set()

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.0f} s] {line}", file=sys.stderr, flush=True)

    def _settings(self) -> dict[str, Any]:
        """What rounds of one file have in common."""
        args = self.args
        found = {key: getattr(args, key) for key in ("pair", "fixed", "tokens", "after")}
        found |= {key: getattr(args, key) for key in ("requests", "dtype", "prompts")}
        if args.pair == real.NAME:
            found |= {"suites": args.suites, "specs": self.specs}
        return found | {"lengths": args.lengths if args.fixed else None}

    def _resume(self) -> None:
        path = Path(self.args.json) if self.args.json else None
        if path is None or not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("settings") != self.settings:
            raise SystemExit(f"error: {path} was measured with other settings; name another file")
        self.rounds.update(before["rounds"])

    def _prompts(self) -> list[list[int]]:
        """One of each category in turn: rounds walk along them."""
        limit = self.base.target.max_positions - self.args.tokens - 16
        if self.args.pair == real.NAME:
            return real.mixed(self.base, self.args.prompts_dir, self.args.suites, limit)
        return mixed(self.base, self.args.prompts, limit)

    # -- measuring --------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        return [
            Cell(entry.name, batch, temperature)
            for temperature in self.args.temperatures
            for batch in self.args.batches
            for entry in self.entries
        ]

    def work(self) -> Iterator[Cell]:
        """Measures; yields each cell when it is complete. Ends when the time is up."""
        for cell in self.cells():
            while len(self.rounds[cell.key]) < self.args.rounds:
                spent = time.perf_counter() - self.began
                if self.args.seconds is not None and spent > self.args.seconds:
                    self.say("the time is up")
                    return
                self._round(cell)
                self.save()
            yield cell

    def _round(self, cell: Cell) -> None:
        number, args = len(self.rounds[cell.key]), self.args
        waves = -(-args.requests // cell.batch)
        first = number * waves * cell.batch
        prompts = [self.prompts[(first + n) % len(self.prompts)] for n in range(waves * cell.batch)]
        if cell.batch not in self._warm:
            self._warm.add(cell.batch)
            plain, _ = self._fresh(cell, PLAIN, 0)
            plain.run(prompts[: cell.batch], cell.batch, WARM_UP, cell.temperature)
        names = [PLAIN, *(map(str, args.lengths) if args.fixed else ()), AUTO]
        shift = number % len(names)
        names = names[shift:] + names[:shift]
        built = [self._fresh(cell, name, number) for name in names]
        wait_until_quiet(args.wait, self.say)
        gc.collect()
        others = Neighbours()
        params = SamplingParams(
            temperature=cell.temperature, max_tokens=args.tokens, ignore_eos=True
        )
        contestants = [contestant for contestant, _ in built]
        runs = together(contestants, prompts, cell.batch, params, (EARLY, args.after))
        cores = others.cores()
        done: dict[str, Any] = {
            one.name: _record(run) | {"startup": round(seconds, 3)}
            for (one, seconds), run in zip(built, runs, strict=True)
        }
        texts = {one.name: run.texts for one, run in zip(contestants, runs, strict=True)}
        same = sum(a == b for a, b in zip(texts[PLAIN], texts[AUTO], strict=True))
        done["others"] = None if cores is None else round(cores, 2)
        done["same_text"] = round(same / len(prompts), 3)
        for one in contestants:
            one.llm.close()
        self.rounds[cell.key].append(done)
        ratio = done[AUTO]["speed"] / done[PLAIN]["speed"]
        busy = "" if cores is None or cores < 0.3 else f", others keep {cores:.1f} cores busy"
        self.say(f"{cell.key} round {number + 1}/{args.rounds}: auto / plain {ratio:.3f}{busy}")

    def _fresh(self, cell: Cell, name: str, number: int) -> tuple[Contestant, float]:
        """An LLM without any history, and the seconds that it took to build."""
        start = time.perf_counter()
        llm = self.base.beside(
            None if name == PLAIN else self.specs[cell.drafter],
            max_batch_size=cell.batch,
            draft_length="auto" if name == AUTO else 0 if name == PLAIN else int(name),
            prefix_sharing=False,  # every round reads its prompts again
            seed=number,
        )
        return Contestant(name, llm, self.ends), time.perf_counter() - start

    # -- what comes of it -------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        rounds = {key: found for key, found in self.rounds.items() if found}
        figures = summary(rounds, self.args.fixed)
        return {
            "settings": self.settings,
            "machine": machine("cpu"),
            "worst": min((own["ratio"] for own in figures.values()), default=None),
            "cells": figures,
            "rounds": rounds,
        }

    def save(self) -> None:
        """Written aside and renamed: what is there is whole."""
        if self.args.json:
            path = Path(self.args.json)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(self.record()) + "\n", encoding="utf-8")
            partial.replace(path)


def _record(run: Run) -> dict[str, Any]:
    """A run as it goes into the file."""
    found = asdict(run)
    for key in ("texts", "steps", "late_tokens", "late_seconds"):
        found.pop(key)
    return found | {"speed": run.speed}


@dataclass
class Ending:
    """The exit status of a measuring program."""

    status: int = 0


@contextmanager
def until_interrupted() -> Iterator[Ending]:
    """Ctrl-C ends the block, whose figures until then count; an error of ours ends the program."""
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        print("interrupted: the figures below are of what was measured", file=sys.stderr)
        ending.status = 130
    except (inflate.InflateError, PacelineError) as error:
        raise SystemExit(f"error: {error}") from None


def main(arguments: list[str]) -> None:
    """Measure as the command line says."""
    args = parse(arguments)
    bench: Bench | None = None
    with until_interrupted() as ending:
        bench = Bench(args)
        for cell in bench.work():
            bench.say(cell_line(cell.key, bench.rounds[cell.key], args.fixed))
    if bench is None:
        raise SystemExit(ending.status)
    record = bench.record()
    report = as_report(record)
    print_report(report, Console(width=max(120, Console().width)))
    if args.report:
        report.write(args.report)
    missed = [key for key, own in record["cells"].items() if not own["met"]]
    print(json.dumps({"worst": record["worst"], "missed": missed}))
    raise SystemExit(ending.status)
