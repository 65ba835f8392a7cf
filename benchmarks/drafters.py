"""Compares every drafter with plain decoding, cell by cell, each from a fresh state.

A cell is a batch size and a sampling mode: `greedy`, `sampled` (temperature 1, no seeds) or
`seeded`. With several requests, `sampled` is measured as `seeded`: unseeded answers differ in
length, and a batch takes as long as its longest. For each cell, new engines are built over one
loaded target (controller, drafter and cache without any history), with and without drafts. They
decode the same prompts, a batch at a time, in turns of a tenth of a second, each on its own clock,
prefill included. Three passes:

- `first`: the first `--num-prompts` requests, spread over the sets
- `later`: `--later` other prompts, after all of those (24 answers of 96 tokens: 2,300 tokens)
- `again`: the first `--again` prompts once more

With `--fixed` every drafter also decodes at fixed draft lengths, and the adaptive length is
compared with the best of them and plain decoding. `--form` is the precision of the target's
weights, one per process; `--model FOLDER --weights NAME` measures another checkpoint of the same
shape under that name.

    python benchmarks/drafters.py --quick
    python benchmarks/drafters.py --pair smollm2 --form int8 --json runs/cells.jsonl --seconds 200
    python benchmarks/drafters.py --pair smollm2 --cells 'b1/*' --drafters quantized --fixed 0,2,4,8
    python benchmarks/drafters.py --json runs/cells.jsonl --report table.md

Each finished cell is a line of `--json`; the next call skips cells that are there (`--rounds`
times). If nothing is left to measure, it reports the cells of the file. The last line of the output
is JSON: the speeds relative to plain decoding."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local folders

from rich.console import Console

import inflate
import real
from drafter_figures import PLAIN, as_report, brief, ratios
from measuring import (
    OtherLoad,
    append_record,
    numbers,
    read_records,
    rotated,
    wait_until_quiet,
)
from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive
from paceline.errors import PacelineError
from paceline.lab.bench.prompts import evenly, interleave
from paceline.lab.bench.result import machine_of
from paceline.lab.report.render import print_report, write
from paceline.llm import LLM
from prompts import ALL_SUITES, FOLDER, available_suites, load_suites
from rows import Weights, specs_of, weights_of, write_useless
from waves import WaveEngine, texts_of, together

FORMS = {"bf16": ("bfloat16", None), "float32": ("float32", None)} | {
    bits: ("bfloat16", bits) for bits in ("int8", "int4")
}
MODES = ("greedy", "sampled", "seeded")
REAL_ROWS = ("ngram", "suffix", "recycling", "eagle3", "quantized", "auto")  # the default
USELESS = "useless"  # a draft model with random weights; only on request
WARM_UP = 4  # tokens that plain decoding generates first: kernels, lazy imports


@dataclass(frozen=True)
class Cell:
    """A batch size and a sampling mode, which are measured with all engines in turns."""

    batch: int
    mode: str

    @property
    def key(self) -> str:
        return f"b{self.batch}/{self.mode}"

    def params(self, index: int, tokens: int) -> SamplingParams:
        """The parameters of prompt ``index``; each engine knows its own end tokens."""
        return SamplingParams(
            temperature=0.0 if self.mode == "greedy" else 1.0,
            seed=index if self.mode == "seeded" else None,
            max_tokens=tokens,
            ignore_eos=True,
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt of one of the sets; ``index``: its number among all prompts."""

    index: int
    set: str
    ids: list[int]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the tiny pair and few prompts: some minutes")
    add("--pair", "--pairs", default="tiny", help=f"tiny, inflated, {real.NAME}, or a folder")
    add(
        "--model",
        "--target",
        dest="target",
        help=f"folder, of the shape of {real.TARGET} or paceline/tiny",
    )
    add("--weights", default="pulled", help="name of the target's weights in the tables")
    add("--presets", default="target,draft", help="sizes of the inflated pair")
    real.add_weights(parser)
    add("--eagle", help="EAGLE head of the small pairs: folder, or none to omit it")
    add("--form", default="bf16", choices=FORMS, help="precision of the target's weights")
    add("--device", default="auto")
    add("--drafters", "--only", help="names of rows, comma-separated; default: all available")
    add("--spec", action="append", default=[], metavar="NAME=SPEC", help="add a drafter")
    add("--fixed", type=numbers, default=[], help="fixed draft lengths to measure as well, 0,2,4")
    add("--concurrency", "--batches", dest="batches", type=numbers, default=[1])
    add("--modes", default="greedy,sampled")
    add("--cells", default="*", help="only matching cells, such as 'b1/*' or 'b*/greedy'")
    add("--sets", "--suites", help="comma-separated; default: see README.md")
    add("--prompts-dir", default=str(FOLDER))
    add(
        "--num-prompts",
        "--prompts",
        dest="prompts",
        type=int,
        help="of the first pass; default 24, quick: 10",
    )
    add("--later", type=int, help="other prompts after them; default 8, quick: 0")
    add("--again", type=int, help="repeated prompts of the first pass; default 8, quick: 5")
    add("--max-tokens", "--tokens", dest="tokens", type=int, help="default 96, quick: 48")
    add(
        "--rounds", type=int, default=1, help="how often a cell is measured, earlier calls included"
    )
    add("--seconds", type=float, help="start no cell that would end later")
    add(
        "--wait",
        type=float,
        default=60.0,
        help="most seconds to wait for a quiet machine before a cell",
    )
    add("--json", help="file with a line per cell; its cells are not measured again")
    add("--report", help=".md or .html file for the tables of all cells in --json")
    args = parser.parse_args(arguments)
    defaults = (10, 0, 5, 48) if args.quick else (24, 8, 8, 96)
    for name, value in zip(("prompts", "later", "again", "tokens"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.modes = args.modes.split(",")
    is_real = args.pair == real.NAME
    args.drafters = args.drafters or (",".join(REAL_ROWS) if is_real else None)
    args.sets = args.sets.split(",") if args.sets else [*(real.SETS if is_real else ALL_SUITES)]
    if args.perturb:
        args.weights = "perturbed" if args.weights == "pulled" else args.weights
        if not is_real:
            parser.error(f"--perturb needs --pair {real.NAME}")
    if unknown := set(args.modes) - {*MODES}:
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    if min([*args.batches, args.prompts, args.tokens, args.rounds]) < 1:
        parser.error("--concurrency, --num-prompts, --max-tokens and --rounds must be at least 1")
    if min([0, *args.fixed, args.later, args.again]) < 0:
        parser.error("--fixed, --later and --again must be at least 0")
    if any("=" not in spec for spec in args.spec):
        parser.error("--spec is NAME=SPEC, such as mine=ngram:min=2")
    return args


def chosen_specs(args: argparse.Namespace, weights: Weights) -> dict[str, str]:
    """Draft specs by row. Rows whose weights are missing are left out with a message."""
    specs = specs_of(weights) | dict(text.split("=", 1) for text in args.spec)
    if args.drafters:
        names = [*args.drafters.split(","), *(text.partition("=")[0] for text in args.spec)]
        if unknown := [name for name in names if name not in specs and name != USELESS]:
            known = ", ".join([*specs, USELESS])
            raise SystemExit(f"error: no drafter {unknown[0]!r}; there are {known}")
        specs = {name: specs.get(name, USELESS) for name in names}
    for name in [name for name, spec in specs.items() if not spec]:
        print(f"left out {name}: its weights are missing", file=sys.stderr)
        del specs[name]
    return specs


class Bench:
    """Measures one target in one precision; every cell is a record."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.began = time.perf_counter()
        self.weights = weights_of(args)
        self.specs = chosen_specs(args, self.weights)
        args.sets = available_suites(args.prompts_dir, args.sets)
        self.settings = {
            key: getattr(args, key)
            for key in ("pair", "weights", "form", "sets", "prompts", "later", "again", "tokens")
        }
        self.settings |= {
            "specs": self.specs,
            "fixed": args.fixed,
            "native": os.environ.get("PACELINE_NATIVE", "auto"),
        }
        self.records = read_records(args.json)
        self.scratch, self._longest = scratch, 0.0  # seconds of the longest cell

    def info(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.0f} s] {line}", file=sys.stderr, flush=True)

    def cells(self) -> list[Cell]:
        every = ((batch, mode) for batch in self.args.batches for mode in self.args.modes)
        cells = dict.fromkeys(
            Cell(batch, "seeded" if mode == "sampled" and batch > 1 else mode)
            for batch, mode in every
        )
        return [cell for cell in cells if fnmatch(cell.key, self.args.cells)]

    def done(self, cell: Cell) -> int:
        return sum(
            record["cell"] == cell.key and record["settings"] == self.settings
            for record in self.records
        )

    def work(self) -> None:
        """Measure the cells that are not in the file yet, as far as time allows."""
        todo = [c for c in self.cells() for _ in range(self.args.rounds - self.done(c))]
        if not todo or not self.specs:
            return
        self.info(f"loading {self.weights.target} as {self.args.form}")
        dtype, quantize = FORMS[self.args.form]
        self.base = LLM(
            self.weights.target,
            draft="none",
            dtype=dtype,
            device=self.args.device,
            quantize=quantize,
            max_batch_size=1,
            draft_length=0,
        )
        is_real = self.args.pair == real.NAME
        self.ends = self.base.end_tokens if is_real else frozenset[int]()
        for cell in todo:
            start = time.perf_counter()
            spent = start - self.began + self._longest
            if self.args.seconds is not None and spent > self.args.seconds:
                self.info("no time is left for another cell")
                return
            self.measure(cell)
            self._longest = max(self._longest, time.perf_counter() - start)

    def prompts(self, cell: Cell) -> dict[str, list[Prompt]]:
        """{pass: prompts}, in whole batches, one prompt of each set in turn."""
        first, later = (
            -(-count // cell.batch) * cell.batch for count in (self.args.prompts, self.args.later)
        )
        per_set = -(-(first + later) // len(self.args.sets))
        limit = self.base.target.max_positions - self.args.tokens - 32
        where, is_real = (self.args.prompts_dir, self.args.sets), self.args.pair == real.NAME
        suites = load_suites(*where, self.base, limit, chat=is_real)
        spread = [
            (name, ids) for name, prompts in suites.items() for ids in evenly(prompts, per_set)
        ]
        in_turn = cycle(interleave(spread, itemgetter(0)))
        prompts = [Prompt(n, *pair) for n, pair in enumerate(islice(in_turn, first + later))]
        again = -(-min(self.args.again, first) // cell.batch) * cell.batch
        return {
            "first": prompts[:first],
            "later": prompts[first:],
            "again": prompts[:again],
        }

    def engines(self, cell: Cell) -> Iterator[WaveEngine]:
        """Plain decoding and every drafter, as LLMs without any history."""
        named: dict[str, tuple[str | None, int | str]] = {PLAIN: (None, 0)}
        for row, spec in self.specs.items():
            named[row] = (spec, "auto")
            named |= {f"{row}@{n}": (spec, n) for n in self.args.fixed}
        for name, (draft, length) in named.items():
            if draft == USELESS:
                draft = write_useless(self.weights, self.scratch)
            try:
                llm = self.base.with_draft(
                    draft,
                    max_batch_size=cell.batch,
                    draft_length=length,
                    prefix_sharing=False,  # every pass prefills its prompts
                    seed=0,
                )
            except PacelineError as error:
                self.info(f"left out {name}: {error}")
                continue
            yield WaveEngine(name, llm, self.ends)

    def measure(self, cell: Cell) -> None:
        """Measure all passes of a cell once, and append the record."""
        start = time.perf_counter()
        passes = self.prompts(cell)
        engines = list(self.engines(cell))
        self._warm_up(cell, passes["first"][: cell.batch])
        startup = time.perf_counter() - start
        wait_until_quiet(self.args.wait, self.info)
        gc.collect()
        others = OtherLoad()
        waves = [
            self._wave(name, cell, engines, prompts[n : n + cell.batch], n // cell.batch)
            for name, prompts in passes.items()
            for n in range(0, len(prompts), cell.batch)
        ]
        cores = others.cores()
        for engine in engines:
            engine.llm.close()
        record = {
            "cell": cell.key,
            "settings": self.settings,
            "machine": machine_of(self.base),
            "startup": round(startup, 1),
            "others": None if cores is None else round(cores, 2),
            "waves": waves,
        }
        self.records.append(record)
        append_record(self.args.json, record)
        self.info(f"{cell.key}: {brief(record)}")

    def _warm_up(self, cell: Cell, prompts: list[Prompt]) -> None:
        plain = self.base.with_draft(None, max_batch_size=cell.batch, prefix_sharing=False)
        params = [cell.params(prompt.index, WARM_UP) for prompt in prompts]
        together([WaveEngine(PLAIN, plain)], [prompt.ids for prompt in prompts], params)
        plain.close()

    def _wave(
        self, name: str, cell: Cell, engines: list[WaveEngine], wave: list[Prompt], number: int
    ) -> dict[str, Any]:
        """The counts of all engines for a batch of prompts; the order of the engines rotates."""
        order = rotated(engines, number)
        params = [cell.params(prompt.index, self.args.tokens) for prompt in wave]
        drives = together(order, [prompt.ids for prompt in wave], params)
        by_name = {engine.name: drive for engine, drive in zip(order, drives, strict=True)}
        return {
            "pass": name,
            "sets": [prompt.set for prompt in wave],
            "by": {e.name: _counts(by_name[e.name], by_name[PLAIN]) for e in engines},
        }


def _counts(drive: Drive, plain: Drive) -> dict[str, Any]:
    """The counts of one engine for a batch, and its wall seconds, prefill included. ``steps``: of
    the target, over all sequences; ``drafting``: those with a draft; ``same``: texts that equal
    plain decoding's."""
    counts = drive.counts
    return {
        "tokens": drive.tokens,
        "seconds": drive.seconds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "steps": counts.target_steps,
        "drafting": sum(commit.drafted > 0 for step in drive.steps for commit in step.commits),
        "same": sum(a == b for a, b in zip(texts_of(drive), texts_of(plain), strict=True)),
    }


def main() -> None:
    """Measure as the command line says."""
    args = parse(sys.argv[1:])
    status = 0
    records = read_records(args.json)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(args, Path(scratch))
            records = bench.records
            bench.work()
    except KeyboardInterrupt:
        print("interrupted: the figures below are those of the finished cells", file=sys.stderr)
        status = 130
    except (inflate.InflateError, PacelineError) as error:
        raise SystemExit(f"error: {error}") from None
    if records:
        report = as_report(records)
        print_report(report, Console(width=max(120, Console().width)))
        if args.report:
            write(report, args.report)
    print(json.dumps(ratios(records)))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
