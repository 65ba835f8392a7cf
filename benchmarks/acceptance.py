"""Draft acceptance in our engine: tokens per target step, set by set.

Every drafter decodes the same prompts at a fixed draft length, several together, until the model
ends its answer or `--max-tokens`. Tokens beyond the end of an answer do not count.

`tiny`: the embedded pair. Per suite and their mean: `acceptance` (accepted / drafted tokens) and
`mean_accepted_length` (tokens per target step, the one that reads the prompt included).

    python benchmarks/acceptance.py --target DIR --draft DIR --per-suite 20

`smollm2`: the real model's EAGLE-3 head, draft model and Medusa heads, as chains of `--length` and
as dynamic trees of `--nodes` nodes and `--depth` levels. The step that reads the prompt does not
count, because a head cannot draft before it: plain decoding has exactly 1.

    python benchmarks/acceptance.py --pairs smollm2 --eagle3 FOLDER

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import real
from inflate import InflateError, resolve
from measuring import finish, mean, rounded
from paceline import LLM, PacelineError, SamplingParams
from paceline.engine.driver import Drive, sequence
from paceline.lab.report.columns import number
from paceline.lab.report.document import Report, Table, Text
from paceline.lab.report.render import print_report
from prompts import PARTS, SUITES, default_folder, load_suites

# What was asked of the EAGLE-3 head: mean tokens a step over the sets, and on every set.
WANTED = {"eagle3 chain": 2.4, "eagle3 tree": 2.8}
WANTED_EVERYWHERE = 2.0


@dataclass(frozen=True)
class Row:
    """A draft spec at a fixed length."""

    name: str
    spec: str
    length: int


@dataclass(frozen=True)
class Run:
    """What decoding some prompts together took. ``first``: tokens of the steps that read them."""

    tokens: int
    steps: int
    seconds: float
    drafted: int
    accepted: int
    reached_at: Sequence[int]
    accepted_at: Sequence[int]
    requests: int
    first: int

    @property
    def length(self) -> float:
        """Tokens per target step."""
        return self.tokens / self.steps

    @property
    def decoding_length(self) -> float | None:
        """The same without the steps that read a prompt, as Spec-Bench's mean accepted tokens."""
        steps = self.steps - self.requests
        return (self.tokens - self.first) / steps if steps > 0 else None

    @property
    def by_position(self) -> list[float | None]:
        """Of the drafts that had a token to try there, the share whose token was accepted."""
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return [rounded(accepted / reached, 4) for accepted, reached in pairs if reached]


def rows(args: argparse.Namespace) -> list[Row]:
    """Chains and trees of all drafts that are here."""
    if args.pairs != real.NAME:
        draft = resolve(args.draft or "paceline/tiny-draft")
        return [Row("draft", f"model:{draft}", args.length)]
    chain, nodes = f"chain {args.length}", f"tree {args.nodes}"
    tree = f",nodes={args.nodes},width={args.width}"
    found = []
    if eagle3 := real.find("eagle3", args.eagle3):
        found.append(Row(f"eagle3 {chain}", f"eagle3:{eagle3},nodes=0", args.length))
        found.append(Row(f"eagle3 {nodes}", f"eagle3:{eagle3}{tree}", args.depth))
    if draft := real.find("draft", args.draft):
        found.append(Row(f"draft {chain}", f"model:{draft}", args.length))
        found.append(Row(f"draft {nodes}", f"tree:{draft}{tree}", args.depth))
    if medusa := real.find("medusa", args.medusa):
        found.append(Row(f"medusa {nodes}", f"medusa:{medusa},nodes={args.nodes}", args.depth))
    if not found:
        raise SystemExit("error: no drafts to measure; name some with --eagle3, --draft, --medusa")
    return found


def ends_of(llm: LLM, args: argparse.Namespace) -> frozenset[int]:
    return frozenset() if args.ignore_eos else llm.end_tokens


def decode(llm: LLM, prompts: Sequence[list[int]], args: argparse.Namespace) -> Run:
    """At most ``--batch`` prompts together, prefill included."""
    ends = ends_of(llm, args)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    seqs = [sequence(ids, params, ends) for ids in prompts]
    drive = Drive(llm.engine, seqs, args.batch).run()
    counts = drive.counts
    return Run(
        drive.tokens,
        counts.target_steps,
        drive.seconds,
        counts.drafted,
        counts.accepted,
        counts.reached_at,
        counts.accepted_at,
        len(seqs),
        sum(seq.arrivals[0][1] for seq in seqs),
    )


Figures = dict[str, dict[str, Run]]  # row -> set -> what it did


def measure(args: argparse.Namespace, figures: Figures, about: dict[str, Any]) -> None:
    """Fills ``figures`` row by row, so that Ctrl-C leaves what was measured."""
    todo = rows(args)
    is_real = args.pairs == real.NAME
    folder = real.target_folder(args.target) if is_real else resolve(args.target or "paceline/tiny")
    base = LLM(
        str(folder), draft="none", dtype=args.dtype, device=args.device, max_batch_size=args.batch
    )
    limit = base.target.max_positions - args.max_tokens - max(row.length for row in todo) - 1
    load = real.load_suites if is_real else load_suites
    names = [name for name in args.suites.split(",") if name]
    sets = load(args.prompts_dir, names, base.tokenizer, args.per_suite, limit)
    about["prompts"] = {name: len(prompts) for name, prompts in sets.items()}
    about["from_spec_bench"] = [name for name in sets if name in PARTS]
    console = Console(stderr=True)
    for row in todo:
        llm = base.beside(
            row.spec, draft_length=row.length, prefix_sharing=False, max_batch_size=args.batch
        )
        figures[row.name] = {}
        for name, ids in track([*sets.items()], row.name, console=console, transient=True):
            run = figures[row.name][name] = decode(llm, ids, args)
            length = run.decoding_length if is_real else run.length
            console.print(f"{row.name}, {name}: {rounded(length, 2)} tokens a step")
        llm.close()


def real_record(figures: Figures) -> dict[str, Any]:
    """row -> set -> figures, and their mean over the sets."""
    result: dict[str, Any] = {}
    for row, sets in figures.items():
        result[row] = {
            name: {
                "mean_accepted_length": rounded(run.decoding_length),
                "per_position": run.by_position,
                "tokens": run.tokens,
                "requests": run.requests,
                "seconds": rounded(run.seconds, 1),
            }
            for name, run in sets.items()
        }
        lengths = mean([run.decoding_length for run in sets.values()])
        result[row]["mean"] = {"mean_accepted_length": rounded(lengths)}
    return result


def small_record(figures: Figures) -> dict[str, Any]:
    """set -> figures of the one draft, and their mean."""
    runs = figures.get("draft", {})
    result: dict[str, Any] = {
        name: {
            "acceptance": round(run.accepted / max(1, run.drafted), 4),
            "mean_accepted_length": round(run.length, 4),
            "per_position": run.by_position,
            "drafted": run.drafted,
            "accepted": run.accepted,
        }
        for name, run in runs.items()
    }
    keys = ("acceptance", "mean_accepted_length")
    means = {key: rounded(mean([own[key] for own in result.values()]), 4) for key in keys}
    return result | {"mean": means}


def verdicts(figures: Figures) -> list[str]:
    """Each expectation of the EAGLE-3 head, met or missed."""
    lines = []
    for row, sets in figures.items():
        lengths = {n: r.decoding_length for n, r in sets.items() if r.decoding_length is not None}
        wanted = next((value for name, value in WANTED.items() if row.startswith(name)), None)
        if wanted is None or not lengths:
            continue
        least = min(lengths, key=lambda name: lengths[name])
        for what, value, goal in (
            (f"mean of {len(lengths)} sets", mean([*lengths.values()]) or 0.0, wanted),
            (f"least, {least}", lengths[least], WANTED_EVERYWHERE),
        ):
            verdict = "met" if value >= goal else "MISSED"
            lines.append(f"{verdict}: {row}: {what}: {value:.2f} against {goal:.2f} tokens a step")
    return lines


def report(figures: Figures, is_real: bool) -> Report:
    sets = list(dict.fromkeys(name for row in figures.values() for name in row))
    cells = []
    for row, runs in figures.items():
        found = [runs.get(name) for name in sets]
        lengths = [run and (run.decoding_length if is_real else run.length) for run in found]
        shown = [None if value is None else number(value) for value in (*lengths, mean(lengths))]
        cells.append([row, *shown])
    made = Report("Acceptance")
    table = Table(["", *sets, "mean"], cells)
    made.add("Tokens per target step, bonus token included", table, *map(Text, verdicts(figures)))
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; what is not given is the pair's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--pairs", default="tiny", choices=["tiny", real.NAME])
    add("--target", help=f"default: paceline/tiny, or {real.TARGET}")
    real.add_weights(parser)
    add("--length", type=int, default=4, help="draft length of chains")
    add("--nodes", type=int, default=16, help="of a tree (the real model)")
    add("--depth", type=int, default=6, help="levels of a tree (the real model)")
    add("--width", type=int, default=4, help="of a tree (the real model)")
    add("--temperature", type=float, default=0.0, help="of the real model")
    add("--max-tokens", type=int, default=128)
    add("--batch", type=int, help="prompts together; default: 16, or 8")
    add("--per-suite", type=int, help="prompts; 0: all; default: 20, or 12")
    add("--suites", help="comma-separated; see README.md for the defaults")
    add("--prompts-dir", default=str(default_folder()))
    add("--ignore-eos", action="store_true")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", help="file to write the JSON object to")
    args = parser.parse_args(arguments)
    is_real = args.pairs == real.NAME
    args.batch = args.batch or (8 if is_real else 16)
    if args.per_suite is None:
        args.per_suite = 12 if is_real else 20
    args.suites = args.suites or ",".join(real.ACCEPTANCE_SETS if is_real else SUITES)
    if min(args.length, args.nodes, args.depth, args.width, args.batch, args.max_tokens) < 1:
        parser.error("all numbers but --per-suite and --temperature must be at least 1")
    if is_real and args.ignore_eos:
        parser.error(f"--ignore-eos is for tiny: {real.NAME} ends its answers")
    if not is_real and (args.eagle3 or args.medusa or args.temperature):
        parser.error(f"--eagle3, --medusa and --temperature need --pairs {real.NAME}")
    return args


def main() -> None:
    """Measure as the command line says."""
    args = parse(sys.argv[1:])
    is_real, figures, status = args.pairs == real.NAME, Figures(), 0
    about: dict[str, Any] = {
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "bonus_token_counted": True,
    }
    try:
        measure(args, figures, about)
    except KeyboardInterrupt:
        print("interrupted: the figures below are of what was measured", file=sys.stderr)
        status = 130
    except (InflateError, PacelineError) as error:
        raise SystemExit(f"error: {error}") from None
    print_report(report(figures, is_real), Console(width=max(100, Console().width)))
    record = real_record(figures) | {"settings": about} if is_real else small_record(figures)
    finish(record, args.json)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
