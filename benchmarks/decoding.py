"""Decoding speed: Paceline beside transformers, in one process, taking turns, medians.

Pairs: `tiny`, the embedded pair as it is, `inflated`, the same functions at the cost of real models
(see inflate.py), and `smollm2`, a real model, whose answers end where it ends them (see real.py).
Every engine gets the same token ids, decodes greedily at batch 1 to exactly `--max-tokens` new
tokens (the end token is ignored by all, but for `smollm2`), and is timed from prompt to last token,
prefill included. All engines decode a prompt one after another, in an order that rotates; a figure
is the median over rounds. Prefix sharing between rounds is off.

    python benchmarks/decoding.py --quick
    python benchmarks/decoding.py --pairs tiny --rounds 5 --json tiny.json
    python benchmarks/decoding.py --pairs smollm2 --json smollm2.json

The last line of the output is one JSON object. Ctrl-C prints what was measured until then.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local folders

import torch
from rich.console import Console

import inflate
import real
from decoding_figures import (
    ADAPTIVE,
    ASSISTED,
    BATCH,
    FIXED,
    LOOKUP,
    PLAIN,
    SAMPLED,
    THEIRS,
    Record,
    agreement,
    figures,
    show,
)
from measuring import finish, machine, progress
from paceline import LLM, PacelineError
from paceline.core.params import SamplingParams
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runner import BenchJob, HeatRecord, take_turns
from paceline.lab.bench.runs import Ask, BenchEngine
from prompts import SUITES, default_folder, load_suites

RULES = ("token", "block", "coupled")
DRAFT_LENGTH = 4  # of everything with a fixed draft length, ours and theirs
TOGETHER = 8


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its draft model, where there is one: transformers knows no other
    draft. ``spec``: what ours drafts with. ``ends``: whether answers end by themselves."""

    name: str
    target: str
    draft: str | None
    spec: str
    ends: bool = False


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few prompts, 2 rounds, some minutes")
    add("--pairs", default="tiny,inflated", help=f"tiny, inflated, both, or {real.NAME}")
    real.add_perturb(parser)
    add("--target", help=f"default: paceline/tiny, or {real.TARGET}")
    add("--draft", help="a draft model; default: the target's, with -draft")
    add("--eagle3", help=f"head of {real.NAME}, or none; default: the published")
    add("--presets", default="target,draft", help="sizes of the inflated pair")
    add("--suites", help="comma-separated; see README.md for the defaults")
    add("--rounds", type=int)
    add("--max-tokens", type=int)
    add("--per-suite", type=int, help="prompts a suite")
    add("--prompts-dir", default=str(default_folder()))
    add("--lookup", action="store_true", help="also transformers' prompt lookup")
    add("--rules", action=argparse.BooleanOptionalAction, help="sampled rules too")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--json", help="file to write the JSON object to")
    args = parser.parse_args(arguments)
    defaults = (2, 64, 2, False) if args.quick else (3, 128, 4, True)
    for name, value in zip(("rounds", "max_tokens", "per_suite", "rules"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if unknown := set(args.pairs.split(",")) - {"tiny", "inflated", real.NAME}:
        known = f"tiny and inflated, and {real.NAME}"
        parser.error(f"unknown pair {', '.join(sorted(unknown))}; there are {known}")
    if real.NAME in args.pairs and args.pairs != real.NAME:
        parser.error(f"{real.NAME} has prompts and heads of its own: measure it alone")
    if args.perturb and args.pairs != real.NAME:
        parser.error(f"--perturb is of {real.NAME}")
    if args.pairs != real.NAME:
        args.target = args.target or "paceline/tiny"
        args.draft = args.draft or "paceline/tiny-draft"
    args.suites = args.suites or ",".join(real.SETS if args.pairs == real.NAME else SUITES)
    if min(args.rounds, args.max_tokens, args.per_suite) < 1:
        parser.error("--rounds, --max-tokens and --per-suite must be at least 1")
    return args


def find_pair(name: str, args: argparse.Namespace) -> Pair:
    """The folders of a pair; inflated ones are written on first use.

    The real model drafts with its EAGLE-3 head, else its draft model, else n-grams.
    """
    if name == real.NAME:
        folder = real.target_folder(args.target, args.perturb)
        draft, head = real.find("draft", args.draft), real.find("eagle3", args.eagle3)
        spec = f"eagle3:{head}" if head else draft or "ngram"
        return Pair(name, str(folder), draft, spec, ends=True)
    folders = [inflate.resolve(args.target), inflate.resolve(args.draft)]
    if name == "inflated":
        sizes = [inflate.PRESETS[preset] for preset in args.presets.split(",")]
        folders = [inflate.inflate(*both) for both in zip(folders, sizes, strict=True)]
    target, draft = map(str, folders)
    return Pair(name, target, draft, draft)


class Engines:
    """The engines of one pair: those that decode alone, eight prompts together, and sampled."""

    def __init__(self, llm: LLM, pair: Pair, args: argparse.Namespace) -> None:
        self.llm = llm

        def starter(rule: str) -> Starter:
            return Starter(llm, pair.target, rule=rule)

        def ours(name: str, length: int | Any, rule: str = "auto") -> BenchEngine:
            method = Method(name, pair.spec if length else None, length)
            return starter(rule).open(method, TOGETHER)

        theirs = starter("auto")
        methods = [Method(THEIRS, variant="plain")]
        if pair.draft is not None:
            methods.append(Method(ASSISTED, pair.draft, DRAFT_LENGTH, "assisted"))
        if args.lookup:
            methods.append(Method(LOOKUP, None, DRAFT_LENGTH, "lookup"))
        plain, adaptive = ours(PLAIN, 0), ours(ADAPTIVE, "auto")
        fixed = ours(FIXED, DRAFT_LENGTH, "token")  # greedily the rule makes no difference
        self.single = [*(theirs.open(method, 1) for method in methods), plain, fixed, adaptive]
        self.batched = [plain, adaptive]
        self.sampled = []
        if args.rules:
            sampled = [ours(f"rule {rule}", DRAFT_LENGTH, rule) for rule in RULES]
            self.sampled = [plain, *sampled]


def jobs(
    suites: dict[str, list[list[int]]], tokens: int, ends: bool, temperature: float = 0.0
) -> list[BenchJob]:
    """All prompts alone."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=not ends)
    prefix = SAMPLED if temperature else ""
    return [
        BenchJob(prefix + suite, 1, temperature, index, (Ask(tuple(ids), params),))
        for suite, prompts in suites.items()
        for index, ids in enumerate(prompts)
    ]


def together(alone: list[BenchJob]) -> BenchJob:
    """Eight prompts at once, of all suites alike."""
    every = [job.asks[0] for job in alone]
    chosen = (every * TOGETHER)[:: max(1, len(every) // TOGETHER)][:TOGETHER]
    return BenchJob(BATCH, TOGETHER, 0.0, 0, tuple(chosen))


def measure(
    name: str, engines: Engines, parts: dict[str, list[BenchJob]], rounds: int, record: HeatRecord
) -> None:
    """Every part's jobs by the engines of its name, ``rounds`` times."""
    groups = [(todo, getattr(engines, part)) for part, todo in parts.items()]
    with progress() as bar:
        task = bar.add_task(name, total=rounds * sum(len(t) * len(group) for t, group in groups))

        def advance(steps: int, what: str) -> None:
            bar.update(task, advance=steps, description=f"{name} {what}")

        for todo, group in groups:
            if group:
                take_turns(todo, group, rounds, record, advance)


def run_pair(name: str, args: argparse.Namespace, result: dict[str, Any], out: Console) -> None:
    """Measure one pair and put its figures into ``result``, also when interrupted."""
    pair = find_pair(name, args)
    llm = LLM(pair.target, draft="none", dtype=args.dtype, device=args.device, max_batch_size=1)
    limit = llm.target.max_positions - args.max_tokens - 2 * DRAFT_LENGTH
    load = real.load_suites if name == real.NAME else load_suites
    names = args.suites.split(",")
    suites = load(args.prompts_dir, names, llm.tokenizer, args.per_suite, limit)
    alone = jobs(suites, args.max_tokens, pair.ends)
    parts = {
        "single": alone,
        "sampled": jobs(suites, args.max_tokens, pair.ends, 1.0),
        "batched": [together(alone)],
    }
    heats = HeatRecord()
    try:
        measure(name, Engines(llm, pair, args), parts, args.rounds, heats)
    finally:
        record = Record.of(heats)
        result[name] = figures(record)
        if sys.exc_info()[0] is not None:
            show(name, record, result[name], out)
    for key, names in {
        "plain_equals_transformers": (THEIRS, PLAIN),
        "speculative_equals_plain": (PLAIN, FIXED),
        "adaptive_equals_plain": (PLAIN, ADAPTIVE),
    }.items():
        result[name][key] = agreement(llm, heats, list(suites), *names)
    show(name, record, result[name], out)


def main() -> None:
    """Measure as the command line says."""
    args = parse(sys.argv[1:])
    out = Console(width=max(100, Console().width))
    result: dict[str, Any] = {}
    status = 0
    about = machine(args.device) | {"dtype": args.dtype, "quick": args.quick}
    about |= {"rounds": args.rounds, "max_tokens": args.max_tokens, "per_suite": args.per_suite}
    try:
        for name in args.pairs.split(","):
            run_pair(name, args, result, out)
    except KeyboardInterrupt:
        print("interrupted: the figures below are of what was measured", file=sys.stderr)
        status = 130
    except (inflate.InflateError, PacelineError) as error:
        raise SystemExit(f"error: {error}") from None
    finish(result | {"machine": about}, args.json)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
