"""Never slower: the adaptive draft length against plain decoding and every fixed length.

One target is loaded once; plain decoding, each fixed draft length and "auto" are LLMs over the same
weights, each made for the largest concurrency and used for all of them without a restart. All
decode the same waves of requests, prefill included, to the same number of tokens, in rounds whose
order rotates. A figure is the median over rounds of tokens a second; a ratio is auto's median by
the best of the others' medians. That best is a maximum over noisy medians, so ratios lean downward.

Sections: `sweep` (greedy, every concurrency), `sampled` (temperature 1, concurrency 1 and 8),
`load` (concurrency changes 1 -> 32 -> 4 -> 16 within a run, with draft length over time), `useless`
(a draft of random weights: tokens a second after each request's first hundred tokens, by plain
decoding's; every round with a new LLM, which knows nothing yet). `--matrix` and `--fixed` are
another form, with options of its own: every drafter in every cell, see matrix.py.

    python benchmarks/never_slower.py --quick
    python benchmarks/never_slower.py --report never_slower.md --json never_slower.json
    python benchmarks/never_slower.py --draft ngram --sections sweep
    python benchmarks/never_slower.py --pairs smollm2 --sections sweep --concurrency 1,4,16
    python benchmarks/never_slower.py --matrix --pair tiny --json matrix.json

The last line of the output is one JSON object. Ctrl-C prints what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local folders

import torch
from rich.console import Console

import inflate
import matrix
import real
from never_slower_report import as_record, as_report
from paceline.llm import LLM
from paceline.tools.report.terminal import print_report
from prompts import default_folder, mixed
from report import machine, progress
from waves import Contestant, Run

PLAIN, AUTO = "plain", "auto"
SECTIONS = ("sweep", "sampled", "load", "useless")
PHASES = (1, 32, 4, 16)  # concurrency of the load section, one after another
EARLY = 100  # tokens after which a useless draft must have been found out


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    rounds: int
    tokens: int  # of a request
    prompts: int  # decoded in a round at low concurrency


FULL, QUICK = Amount(3, 64, 12), Amount(2, 48, 4)


@dataclass(frozen=True)
class Cell:
    """One thing that all contestants do in every round."""

    section: str
    concurrency: int
    temperature: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.section}/{self.concurrency}"


Runs = dict[str, dict[str, list[Run]]]  # cell key -> contestant -> rounds


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: 3 minutes")
    parser.add_argument("--pairs", choices=["tiny", "inflated", real.NAME], default="tiny")
    parser.add_argument("--model", "--target", help=f"default: paceline/tiny, or {real.TARGET}")
    parser.add_argument("--draft", help="any spec; default: the pair's draft model or EAGLE-3 head")
    parser.add_argument("--inflated", action="store_true", help="as --pairs inflated")
    parser.add_argument("--prompts-dir", default=str(default_folder()), help=f"of {real.NAME}")
    parser.add_argument("--suites", help=f"of {real.NAME}; default: all of them")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--lengths", help="fixed draft lengths; default 1,2,3,4,6,8, quick: 1,2,4")
    parser.add_argument("--sections", help="default all, quick: sweep,useless")
    parser.add_argument("--prompts", help="a file in place of the shipped prompts")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, help="new tokens of a request")
    parser.add_argument("--json", help="file for all figures and the machine")
    parser.add_argument("--report", help=".md or .html file for tables and plots")
    args = parser.parse_args(arguments)
    args.concurrency = [int(part) for part in args.concurrency.split(",")]
    lengths = args.lengths or ("1,2,4" if args.quick else "1,2,3,4,6,8")
    args.lengths = [int(part) for part in lengths.split(",")]
    args.inflated = args.inflated or args.pairs == "inflated"
    _name_pair(args)
    few = ("sweep,useless",) if args.pairs != real.NAME else ("sweep",)
    every = SECTIONS if args.pairs != real.NAME else ("sweep", "sampled")
    sections = args.sections or ",".join(few if args.quick else every)
    args.sections = sections.split(",")
    given = [number for number in (args.rounds, args.tokens) if number is not None]
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if min([*args.concurrency, *args.lengths, *given]) < 1:
        parser.error("--concurrency, --lengths, --rounds and --tokens must be at least 1")
    return args


def _name_pair(args: argparse.Namespace) -> None:
    """What ``--model`` and ``--draft`` are where they are not given."""
    if args.pairs != real.NAME:
        args.model = args.model or "paceline/tiny"
        args.draft = args.draft or "model:paceline/tiny-draft"
        return
    args.model = str(real.target_folder(args.model))
    if args.draft is None:
        eagle3 = real.find("eagle3", None)
        args.draft = f"eagle3:{eagle3}" if eagle3 else "ngram"


def amount_of(args: argparse.Namespace) -> Amount:
    preset = QUICK if args.quick else FULL
    return Amount(args.rounds or preset.rounds, args.tokens or preset.tokens, preset.prompts)


def write_useless(draft: str, folder: Path) -> str:
    """A draft of the same shape and tokenizer, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = str(inflate.resolve(draft))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return f"model:{folder}"


class Bench:
    """Measures into ``runs``, so that what was measured survives Ctrl-C."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.amount = args, amount_of(args)
        self.most = max([*args.concurrency, *(PHASES if "load" in args.sections else ())])
        model, self.draft = args.model, args.draft
        if args.inflated:
            model = str(inflate.inflate(model, inflate.PRESETS["target"]))
            small = inflate.inflate(_path(args.draft), inflate.PRESETS["draft"])
            self.draft = f"model:{small}"
        self.plain = LLM(model, dtype=args.dtype, draft=None, **self._options(0))
        is_real = args.pairs == real.NAME
        self.ends = self.plain.end_tokens if is_real else frozenset[int]()
        self.prompts = self._prompts()
        self.runs: Runs = defaultdict(lambda: defaultdict(list))
        self.useless = ""
        if "useless" in args.sections:
            shape = _path(self.draft) if self.draft.startswith("model:") else "paceline/tiny-draft"
            self.useless = write_useless(shape, folder)

    def _options(self, length: int | str) -> dict[str, Any]:
        return {
            "max_batch_size": self.most,
            "draft_length": length,
            "prefix_sharing": False,  # every round reads its prompts again
            "seed": 0,
        }

    def _prompts(self) -> list[list[int]]:
        """One of each category in turn, as many as the largest wave needs."""
        longest = max(self.amount.tokens, 3 * EARLY if "useless" in self.args.sections else 0)
        limit = self.plain.target.max_positions - longest - 16
        if self.args.pairs == real.NAME:
            every = real.mixed(self.plain, self.args.prompts_dir, self.args.suites, limit)
        else:
            every = mixed(self.plain, self.args.prompts, limit)
        return [every[n % len(every)] for n in range(max(self.most, self.amount.prompts))]

    # -- what is measured -------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        sections, found = self.args.sections, []
        if "sweep" in sections:
            found += [Cell("sweep", n) for n in self.args.concurrency]
        if "sampled" in sections:
            found += [Cell("sampled", n, 1.0) for n in (1, 8) if n <= self.most]
        if "load" in sections:
            found += [Cell("load", n) for n in PHASES]
        return found

    def contestants(self) -> list[Contestant]:
        fixed = [
            Contestant(str(n), self.plain.beside(self.draft, **self._options(n)), self.ends)
            for n in self.args.lengths
        ]
        auto = Contestant(AUTO, self.plain.beside(self.draft, **self._options("auto")), self.ends)
        return [Contestant(PLAIN, self.plain, self.ends), *fixed, auto]

    def work(self) -> Iterator[str]:
        """Measures; yields what comes next, ``steps`` times."""
        cells = self.cells()
        if cells:
            everyone = self.contestants()
            for number in range(-1, self.amount.rounds):
                shift = number % len(everyone)
                for cell in (c for c in cells if c.section != "load"):
                    for one in everyone[shift:] + everyone[:shift]:
                        yield f"{cell.key}: {one.name}"
                        self._measure(cell, one, number)
                for one in everyone[shift:] + everyone[:shift]:
                    for cell in (c for c in cells if c.section == "load"):
                        yield f"{cell.key}: {one.name}"
                        self._measure(cell, one, number)
        if self.useless:
            yield from self._useless()

    @property
    def steps(self) -> int:
        rounds = (self.amount.rounds + 1) * len(self.cells()) * (len(self.args.lengths) + 2)
        return rounds + (4 * self.amount.rounds if self.useless else 0)

    def _measure(self, cell: Cell, one: Contestant, number: int) -> None:
        """Round -1 warms up: kernels, buffers, lazy imports. It is short and does not count."""
        tokens = self.amount.tokens if number >= 0 else 8
        count = max(self.amount.prompts, cell.concurrency) if number >= 0 else cell.concurrency
        prompts = self.prompts[: count - count % cell.concurrency]
        run = one.run(prompts, cell.concurrency, tokens, cell.temperature)
        if number >= 0:
            self.runs[cell.key][one.name].append(run)

    def _useless(self) -> Iterator[str]:
        """New LLMs each round; plain decoding just before and after, so that drift cancels."""
        tokens = 3 * EARLY
        for _ in range(self.amount.rounds):
            auto = Contestant(AUTO, self.plain.beside(self.useless, **self._options("auto")))
            plain = Contestant(PLAIN, self.plain)
            for count in (1, 8):
                prompts = self.prompts[: max(2, count)]
                for one in (plain, auto):
                    yield f"useless/{count}: {one.name}"
                    run = one.run(prompts, count, tokens, early=EARLY)
                    self.runs[f"useless/{count}"][one.name].append(run)


def _path(draft: str) -> str:
    return draft.partition(":")[2] or draft


def main() -> None:
    """Measure as the command line says."""
    if {"--matrix", "--fixed"} & set(sys.argv[1:]):
        matrix.main(sys.argv[1:])
    args = parse(sys.argv[1:])
    bench: Bench | None = None
    with matrix.until_interrupted() as ending, tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        _run(bench)
    if bench is None:
        raise SystemExit(ending.status)
    record = as_record(bench.runs) | {"machine": machine("cpu"), "quick": args.quick}
    report = as_report(bench.runs, record)
    print_report(report, Console(width=max(110, Console().width)))
    if args.report:
        report.write(args.report)
    if args.json:
        Path(args.json).write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(json.dumps(record["worst"]))
    raise SystemExit(ending.status)


def _run(bench: Bench) -> None:
    with progress() as bar:
        task = bar.add_task("never slower", total=bench.steps)
        for title in bench.work():
            bar.update(task, advance=1, description=title)


if __name__ == "__main__":
    main()
