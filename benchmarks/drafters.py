"""Every drafter on every suite: tokens a step, acceptance by position, speed by plain decoding's.

One target at a time (`tiny`, the embedded one, and `inflated`, the same function at the size of a
real model, see inflate.py); all drafters around it in one process.

Acceptance is measured at a fixed draft length (4 levels; 8 for what draws on history), several
prompts together; on the inflated target, whose acceptance is that of the small one, it is that of
the timed runs. Speed is measured at the adaptive length, which is what users get: batch 1, a
prompt decoded by plain decoding and all drafters in turn, in an order that rotates, prefill
included, exactly `--max-tokens` new tokens (the end token is ignored by all). A suite's figure is
the median over its prompts of plain decoding's seconds by the drafter's on the same prompt. Every
prompt is decoded once, because some drafters learn from what they have seen; temperatures 0 and
1 have prompts of their own for the same reason. At temperature 1 requests bring no seed (the
engine's generator starts at 0), as users run it. The rows "repeated" are the greedy prompts again:
every second one as it was, the others with changed words.

    python benchmarks/drafters.py --quick
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import inflate
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
from paceline.drafters import Loading
from paceline.errors import PacelineError
from prompts import ALL_SUITES, default_folder, encode, read_texts, spread
from report import machine
from standings import (
    Standings,
    expectations,
    main_rows,
    markdown,
    merged,
    node_rows,
    position_rows,
    table,
)

MODELS = ("tiny", "inflated")
REPEATING = ("ngram", "suffix")
LARGEST_DRAFT = 16  # levels that a draft may reach beyond the last token


@dataclass(frozen=True)
class Amount:
    """How much is measured of one target."""

    prompts: int  # of a suite and temperature, at a fixed length; 0: only timed runs
    timed: int
    tokens: int


FULL = {"tiny": Amount(6, 3, 128), "inflated": Amount(0, 1, 96)}
QUICK = {"tiny": Amount(2, 1, 48), "inflated": Amount(0, 1, 32)}


@dataclass(frozen=True)
class Suite:
    """Token ids by temperature, and the greedy ones once more."""

    name: str
    prompts: dict[float, list[list[int]]]
    repeated: list[list[int]]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny only, few prompts: 3 minutes")
    parser.add_argument("--models", help="tiny, inflated or both; default: both, quick: tiny")
    parser.add_argument("--target", default="paceline/tiny")
    parser.add_argument("--draft", default="paceline/tiny-draft")
    parser.add_argument("--medusa", default="paceline/tiny-medusa")
    parser.add_argument("--eagle", default="paceline/tiny-eagle")
    parser.add_argument("--eagle3", default="paceline/tiny-eagle3")
    parser.add_argument("--presets", default="target,draft", help="sizes of the inflated pair")
    parser.add_argument("--only", help="these rows (comma-separated) beside plain decoding")
    parser.add_argument("--suites", default=",".join(ALL_SUITES))
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
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are tiny and inflated")
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


def varied(form: str, text: str) -> str:
    """Nearly the same request: a chat asks once more politely, a text starts a little later."""
    if form == "chat":
        return f"{text} Please answer."
    start = text.find(" ", len(text) // 8) + 1
    return text[start:]


def load_suites(args: argparse.Namespace, loading: Loading, amount: Amount) -> list[Suite]:
    """Prompts that fit into the context with the answer; the longer ones are left out."""
    limit = loading.target.max_positions - amount.tokens - LARGEST_DRAFT
    count = max(amount.prompts, amount.timed)
    suites = []
    for name in args.suites.split(","):
        texts = read_texts(args.prompts_dir, name)
        every = [(encode(loading.tokenizer, *text), text) for text in texts]
        fitting = [item for item in every if len(item[0]) <= limit]
        if len(fitting) < len(every):
            left = len(every) - len(fitting)
            print(f"{name}: {left} of {len(every)} prompts are too long: left out", file=sys.stderr)
        chosen = spread(fitting, count * len(args.temperatures))
        if not chosen:
            raise SystemExit(f"error: no prompt of {name} fits into {limit} tokens")
        parts = len(args.temperatures) if len(chosen) >= len(args.temperatures) else 1
        prompts = {
            temperature: [ids for ids, _ in chosen[index % parts :: parts]]
            for index, temperature in enumerate(args.temperatures)
        }
        greedy = chosen[::parts]
        repeated = [
            ids if index % 2 == 0 else encode(loading.tokenizer, text[0], varied(*text))
            for index, (ids, text) in enumerate(greedy)
        ]
        suites.append(Suite(name, prompts, [ids[-limit:] for ids in repeated]))
    return suites


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
        layers = read_layers(args.target), self.loading.target.num_layers
        skip = skip_option(*layers) if model == "inflated" else ""
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
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
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
        return entrant.run(prompts[: self.amount.prompts], self.amount.tokens, temperature)

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
                run = entrant.run([prompt], self.amount.tokens, case[0])
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
        for line in expectations(standings):
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
