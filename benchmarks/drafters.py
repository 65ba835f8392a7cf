"""Every drafter on every suite: tokens a step, acceptance by position, speed by plain decoding's.

One target at a time (`tiny`, the embedded one, and `inflated`, the same function at the size of a
real model, see inflate.py); all drafters around it in one process.

Acceptance is measured at a fixed draft length (4 levels; 8 for what draws on history), several
prompts together; on the inflated target, whose acceptance is that of the small one, it is that of
the timed runs. Speed is measured at the adaptive length, which is what users get: batch 1, a
prompt decoded by plain decoding and all drafters in turn, in an order that rotates, prefill
included, exactly `--max-tokens` new tokens (the end token is ignored by all; the real model ends
its answers). A suite's figure is the median over its prompts of plain decoding's seconds a token by
the drafter's on the same prompt. Every
prompt is decoded once, because some drafters learn from what they have seen; temperatures 0 and
1 have prompts of their own for the same reason. At temperature 1 requests bring no seed (the
engine's generator starts at 0), as users run it. The rows "repeated" are the greedy prompts again:
every second one as it was, the others with changed words.

    python benchmarks/drafters.py --quick
    python benchmarks/drafters.py --pairs smollm2 --only eagle3,hybrid,ngram,suffix
    python benchmarks/drafters.py --models tiny --markdown drafters.md --json drafters.json

The last line of the output is one JSON object: name -> suite -> figures at temperature 0 of the
first model; `temperature_1` and `inflated` hold the others. Ctrl-C prints what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local folders

import torch
from rich.console import Console

import inflate
import real
from drafter_suites import Amount, load_suites
from entrants import (
    PLAIN,
    REPEATED,
    Entrant,
    Entry,
    Run,
    Weights,
    entries,
    equal_nodes,
    find,
    load_target,
    skip_option,
)
from inflate_heads import inflate_heads
from paceline.errors import PacelineError
from prompts import ALL_SUITES, default_folder
from report import machine, progress
from standings import (
    Standings,
    expectations,
    main_rows,
    markdown,
    merged,
    node_rows,
    position_rows,
    real_expectations,
    table,
)

MODELS = ("tiny", "inflated")  # one function at two sizes; the real model is measured alone
REPEATING = ("ngram", "suffix")


FULL = {"tiny": Amount(6, 3, 128), "inflated": Amount(0, 1, 96), real.NAME: Amount(0, 4, 128)}
QUICK = {"tiny": Amount(2, 1, 48), "inflated": Amount(0, 1, 32), real.NAME: Amount(0, 1, 48)}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny only, few prompts: 3 minutes")
    parser.add_argument(
        "--models",
        "--pairs",
        help=f"tiny, inflated, both, or {real.NAME}; default: both, quick: tiny",
    )
    parser.add_argument("--target", help=f"default: paceline/tiny, or {real.TARGET}")
    for kind in ("draft", "medusa", "eagle", "eagle3"):
        parser.add_argument(f"--{kind}", help=f"folder; default: as the target's, with -{kind}")
    parser.add_argument("--presets", default="target,draft", help="sizes of the inflated pair")
    parser.add_argument("--only", help="these rows (comma-separated) beside plain decoding")
    parser.add_argument("--suites", help="comma-separated; see README.md for the defaults")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, help="of a suite, at a fixed draft length")
    parser.add_argument("--timed", type=int, help="prompts of a suite that are timed")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--prompts-dir", default=str(default_folder()))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", help="file for the figures, the node budget and the machine")
    parser.add_argument("--markdown", help="file for the tables")
    args = parser.parse_args(arguments)
    args.models = (args.models or ("tiny" if args.quick else "tiny,inflated")).split(",")
    args.temperatures = [float(part) for part in args.temperatures.split(",")]
    if real.NAME in args.models and len(args.models) > 1:
        parser.error(f"{real.NAME} has prompts and heads of its own: measure it alone")
    if unknown := set(args.models) - {*MODELS, real.NAME}:
        parser.error(
            f"unknown model {', '.join(sorted(unknown))}; there are tiny and inflated, "
            f"and {real.NAME}"
        )
    is_real = args.models == [real.NAME]
    args.suites = args.suites or ",".join(real.SETS if is_real else ALL_SUITES)
    if not is_real:
        args.target = args.target or "paceline/tiny"
        for kind in ("draft", "medusa", "eagle", "eagle3"):
            setattr(args, kind, getattr(args, kind) or f"paceline/tiny-{kind}")
    given = [number for number in (args.timed, args.max_tokens) if number is not None]
    if min(given, default=1) < 1 or (args.prompts or 0) < 0:
        parser.error("--timed and --max-tokens must be at least 1, --prompts at least 0")
    return args


def amount_of(model: str, args: argparse.Namespace) -> Amount:
    """The preset, with what the command line says."""
    preset = (QUICK if args.quick else FULL)[model]
    return Amount(
        preset.prompts if args.prompts is None else args.prompts,
        args.timed or preset.timed,
        args.max_tokens or preset.tokens,
    )


def weights_of(model: str, args: argparse.Namespace) -> Weights:
    """Folders of the target and of what its drafters load; inflated ones are written at need."""
    if model == real.NAME:
        folders = {kind: real.find(kind, getattr(args, kind)) for kind in real.DRAFTS}
        return Weights(str(real.target_folder(args.target)), **folders)
    if model == "tiny":
        same = [find(n, lambda p: p) for n in (args.draft, args.medusa, args.eagle, args.eagle3)]
        return Weights(str(inflate.resolve(args.target)), *same)
    big, small = (inflate.PRESETS[preset] for preset in args.presets.split(","))
    target = inflate.inflate(args.target, big)
    heads = [
        find(name, lambda folder: inflate_heads(folder, args.target, big))
        for name in (args.medusa, args.eagle, args.eagle3)
    ]
    return Weights(str(target), find(args.draft, lambda p: inflate.inflate(p, small)), *heads)


def read_layers(model: str) -> int:
    """Layers of the model in a folder."""
    config = json.loads((inflate.resolve(model) / "config.json").read_text())
    return inflate.read_shape(config).layers


@dataclass(frozen=True)
class Job:
    """Work that yields after each of its ``steps``, for the progress bar."""

    title: str
    steps: int
    work: Iterator[None]


class Bench:
    """Measures one target into its standings."""

    def __init__(self, model: str, args: argparse.Namespace, standings: Standings) -> None:
        self.model, self.args, self.standings = model, args, standings
        self.amount = amount_of(model, args)
        self.weights = weights_of(model, args)
        self.loading = load_target(self.weights.target, args.dtype, args.device)
        self.suites = load_suites(args, self.loading, self.amount)
        self.ends = real.end_tokens(self.loading) if model == real.NAME else frozenset[int]()
        skip = ""
        if model == "inflated":
            skip = skip_option(read_layers(args.target), self.loading.target.num_layers)
        wanted = args.only.split(",") if args.only else None
        self.entries = [
            entry
            for entry in entries(self.weights, skip)
            if wanted is None or entry.name in (PLAIN, *wanted)
        ]
        # Chains and trees are compared once, where every row is asked for.
        with_nodes = wanted is None and self.amount.prompts > 0 and 0.0 in args.temperatures
        self.nodes = equal_nodes(self.weights) if with_nodes else []

    def build(self, entry: Entry, length: int | str, batch: int) -> Entrant | None:
        """An entrant, warmed up; None if it cannot be had, which is noted once."""
        try:
            entrant = Entrant(entry, self.loading, length, batch)
        except (PacelineError, inflate.InflateError) as error:
            self.standings.skipped.setdefault(entry.name, str(error))
            return None
        entrant.run([list(range(2, 18))], 8, 0.0)  # buffers, kernels, lazy imports
        return entrant

    def run(self) -> None:
        with progress() as bar:
            jobs = [*self.fixed(), *self.timed()]
            task = bar.add_task(self.model, total=sum(job.steps for job in jobs))
            for job in jobs:
                bar.update(task, description=f"{self.model}: {job.title}")
                for _ in job.work:
                    bar.advance(task)

    # -- acceptance at a fixed length ------------------------------------------------------------

    def fixed(self) -> Iterator[Job]:
        if not self.amount.prompts:
            return
        per_row = len(self.suites) * len(self.args.temperatures)
        for entry in self.entries:
            if entry.name != PLAIN:
                yield Job(entry.name, per_row, self._fixed_row(entry))
        for entry in self.nodes:
            yield Job(entry.name, len(self.suites), self._node_row(entry))

    def _fixed_row(self, entry: Entry) -> Iterator[None]:
        entrant = self.build(entry, entry.levels, self.amount.prompts)
        if entrant is None:
            return
        for temperature in self.args.temperatures:
            for suite in self.suites:
                case = (temperature, suite.name)
                run = self._together(entrant, suite.prompts[temperature], temperature)
                self.standings.fixed[case][entry.name] = run
                yield
            if entry.name in REPEATING and temperature == 0:
                for suite in self.suites:
                    run = self._together(entrant, suite.repeated, 0.0)
                    self.standings.fixed[0.0, suite.name][entry.name + REPEATED] = run

    def _node_row(self, entry: Entry) -> Iterator[None]:
        entrant = self.build(entry, entry.levels, self.amount.prompts)
        if entrant is None:
            return
        for suite in self.suites:
            run = self._together(entrant, suite.prompts[0.0], 0.0)
            self.standings.nodes[entry.name][suite.name] = run
            yield

    def _together(self, entrant: Entrant, prompts: list[list[int]], temperature: float) -> Run:
        some = prompts[: self.amount.prompts]
        return entrant.run(some, self.amount.tokens, temperature, self.ends)

    # -- speed at the adaptive length ------------------------------------------------------------

    def timed(self) -> Iterator[Job]:
        rounds = self.amount.timed * len(self.suites) * len(self.args.temperatures)
        yield Job("timed runs", rounds * len(self.entries), self._timed_runs())

    def _timed_runs(self) -> Iterator[None]:
        built = [self.build(entry, "auto", 1) for entry in self.entries]
        entrants = [entrant for entrant in built if entrant is not None]
        for temperature in self.args.temperatures:
            for suite in self.suites:
                case = (temperature, suite.name)
                yield from self._rounds(case, suite.prompts[temperature], entrants, "")
            if temperature == 0:
                again = [e for e in entrants if e.name in (PLAIN, *REPEATING)]
                for suite in self.suites if len(again) > 1 else ():
                    for _ in self._rounds((0.0, suite.name), suite.repeated, again, REPEATED):
                        pass

    def _rounds(
        self,
        case: tuple[float, str],
        prompts: Sequence[list[int]],
        entrants: list[Entrant],
        suffix: str,
    ) -> Iterator[None]:
        """One round a prompt: all decode it, in an order that rotates."""
        done = len(self.standings.rounds[case])
        for number, prompt in enumerate(prompts[: self.amount.timed]):
            shift = number % len(entrants)
            for entrant in entrants[shift:] + entrants[:shift]:
                run = entrant.run([prompt], self.amount.tokens, case[0], self.ends)
                name = entrant.name + (suffix if entrant.name != PLAIN else "")
                self.standings.timed(case, name, run, done + number)
                yield


def show(model: str, standings: Standings, out: Console) -> str:
    """Print the tables of one target; returns them as markdown."""
    texts = []
    for temperature in standings.temperatures():
        title = f"{model}, temperature {temperature:g}: tokens a step, speed by plain decoding's"
        tables = [(title, main_rows(standings, temperature))]
        title = f"{model}, temperature {temperature:g}: acceptance by position"
        tables.append((title, position_rows(standings, temperature)))
        texts += _print(tables, out)
    if standings.nodes:
        title = f"{model}, temperature 0: tokens a step with 8 nodes"
        texts += _print([(title, node_rows(standings))], out)
    for name, reason in standings.skipped.items():
        out.print(f"left out {name}: {reason}", highlight=False, soft_wrap=True)
    return "\n\n".join(texts)


def _print(tables: list[tuple[str, list[list[str]]]], out: Console) -> list[str]:
    for title, rows in tables:
        out.print(table(title, rows))
    return [f"### {title}\n\n{markdown(rows)}" for title, rows in tables]


def main() -> None:
    """Measure as the command line says."""
    args = parse(sys.argv[1:])
    about = machine(args.device) | {"dtype": args.dtype, "quick": args.quick}
    models: dict[str, Standings] = {}
    status = 0
    try:
        for model in args.models:
            models[model] = Standings()
            Bench(model, args, models[model]).run()
    except KeyboardInterrupt:
        print("interrupted: the figures below are of what was measured", file=sys.stderr)
        status = 130
    except (inflate.InflateError, PacelineError) as error:
        raise SystemExit(f"error: {error}") from None
    out = Console(width=max(120, Console().width))
    texts = [show(model, standings, out) for model, standings in models.items()]
    for model, standings in models.items():
        judge = real_expectations if model == real.NAME else expectations
        for line in judge(standings):
            out.print(f"{model}: {line}", highlight=False, soft_wrap=True)
    if args.markdown:
        Path(args.markdown).write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    figures = merged(models)
    if args.json:
        nodes = {model: standings.node_figures() for model, standings in models.items()}
        everything = {"drafters": figures, "equal_nodes": nodes, "machine": about}
        Path(args.json).write_text(json.dumps(everything) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
