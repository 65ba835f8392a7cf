"""Decoding speed: Paceline beside transformers, in one process, taking turns, medians.

Pairs: `tiny`, the embedded pair as it is, `inflated`, the same functions at the cost of real models
(see inflate.py), and `smollm2`, a real model, whose answers end where it ends them (see real.py).
Every engine gets the same token ids, decodes greedily at batch 1 to exactly `--max-tokens` new
tokens (the end token is ignored by all, but for `smollm2`), and is timed from prompt to last token,
prefill included; then eight prompts together, and with `--rules` at temperature 1. Turns, figures
and tables are those of `paceline bench`; prefix sharing between rounds is off.

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
from measuring import finish, machine, mean, progress, rounded
from paceline import LLM, PacelineError
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.figures import OVERALL, Row
from paceline.lab.bench.methods import PLAIN, Method
from paceline.lab.bench.pages import report_of
from paceline.lab.bench.result import BenchResult
from paceline.lab.bench.runner import EVERYTHING, Sweep, take_turns, warm_up
from paceline.lab.bench.runs import HeatRecord
from paceline.lab.report.render import print_report
from prompts import SUITES, default_folder, load_suites

RULES = ("token", "block", "coupled")
DRAFT_LENGTH = 4  # of everything with a fixed draft length, ours and theirs
TOGETHER = 8
FIXED, ADAPTIVE = f"fixed {DRAFT_LENGTH}", "adaptive"
THEIRS, ASSISTED, LOOKUP = "transformers", "transformers assisted", "transformers lookup"


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


@dataclass(frozen=True)
class Part:
    """Methods that take turns on the prompts, one at a time or several ``together``. ``rules``: how
    drafts of a method are judged."""

    methods: list[Method]
    together: int = 1
    temperature: float = 0.0
    rules: tuple[str, ...] = ("auto",)


def parts_of(pair: Pair, args: argparse.Namespace) -> list[Part]:
    """Everybody alone, eight prompts together, and the rules of sampling."""
    plain, adaptive = Method(PLAIN, length=0), Method(ADAPTIVE, pair.spec, "auto")
    alone = [Method(THEIRS, variant="plain")]
    if pair.draft is not None:
        alone.append(Method(ASSISTED, pair.draft, DRAFT_LENGTH, "assisted"))
    if args.lookup:
        alone.append(Method(LOOKUP, None, DRAFT_LENGTH, "lookup"))
    alone += [plain, Method(FIXED, pair.spec, DRAFT_LENGTH), adaptive]
    parts = [Part(alone), Part([plain, adaptive], TOGETHER)]
    if args.rules:
        sampled = [Method(f"rule {rule}", pair.spec, DRAFT_LENGTH) for rule in RULES]
        parts.append(Part([plain, *sampled], 1, 1.0, ("auto", *RULES)))
    return parts


def measure(
    llm: LLM,
    pair: Pair,
    args: argparse.Namespace,
    prompts: list[tuple[str, list[int]]],
    record: HeatRecord,
) -> None:
    """Fills the record, part by part."""
    with progress() as bar:
        for part in parts_of(pair, args):
            sweep = Sweep(
                args.max_tokens, temperatures=[part.temperature], ignore_eos=not pair.ends
            )
            todo = sweep.jobs(prompts, part.together)
            if part.together > 1:  # each prompt at most once
                todo = sweep.jobs(prompts[:: max(1, len(prompts) // TOGETHER)], part.together, 1)
            runs = args.rounds * len(todo) * len(part.methods)
            task = bar.add_task(f"{pair.name}, {part.together} at once", total=runs)
            rules = part.rules * (len(part.methods) if len(part.rules) == 1 else 1)
            engines = [
                Starter(llm, pair.target, rule=rule).open(method, part.together)
                for method, rule in zip(part.methods, rules, strict=True)
            ]
            warm_up(todo, engines)
            take_turns(todo, engines, args.rounds, record, lambda _, t=task: bar.advance(t))  # type: ignore[misc]


def figures(rows: list[Row]) -> dict[str, Any]:
    """The JSON object of one pair: ratios of median tokens a second; null is not measured."""
    speeds = {(r.concurrency, r.temperature, r.category, r.method): r for r in rows}
    suites = list(
        dict.fromkeys(r.category for r in rows if r.category not in (OVERALL, EVERYTHING))
    )

    def speed(suite: str, method: str, together: int = 1, temperature: float = 0.0) -> float | None:
        row = speeds.get((together, temperature, suite, method))
        return None if row is None else row.tokens_per_second.median

    def ratio(suite: str, fast: str, slow: str, together: int = 1) -> float | None:
        one, other = speed(suite, fast, together), speed(suite, slow, together)
        return None if one is None or other is None else rounded(one / other)

    def by_suite(fast: str, slow: str) -> dict[str, float | None]:
        return {suite: ratio(suite, fast, slow) for suite in suites}

    greedy = [row for row in rows if not row.temperature]
    drafts: dict[str, Any] = {}
    rates: dict[str, dict[str, float | None]] = {}
    for row in greedy:
        rates.setdefault(row.category, {})[row.method] = rounded(row.tokens_per_second.median, 1)
        if row.drafts.drafted:
            drafts.setdefault(row.category, {})[row.method] = {
                "acceptance": rounded(row.drafts.acceptance_rate),
                "mean_accepted_length": rounded(row.drafts.mean_accepted_length),
            }
    steps = [row for row in greedy if row.method == FIXED and row.phases]
    shares = {
        phase: rounded(mean([row.phases[phase] / row.step for row in steps]), 4)
        for phase in (steps[0].phases if steps else ())
    }
    sampled = {
        name: rounded(mean([speed(suite, name, 1, 1.0) for suite in suites]), 1)
        for name in (PLAIN, *(f"rule {rule}" for rule in RULES))
    }
    return {
        "plain_vs_transformers": rounded(mean([ratio(s, PLAIN, THEIRS) for s in suites])),
        "speculative_vs_plain": by_suite(FIXED, PLAIN),
        "adaptive_vs_plain": by_suite(ADAPTIVE, PLAIN),
        "speculative_vs_assisted": by_suite(FIXED, ASSISTED),
        "batch8_adaptive_vs_plain": ratio(EVERYTHING, ADAPTIVE, PLAIN, TOGETHER),
        "tokens_per_second": rates,
        "drafts": drafts,
        "step_shares": shares,
        "sampled_tokens_per_second": sampled,
    }


def run_pair(name: str, args: argparse.Namespace, result: dict[str, Any], out: Console) -> None:
    """Measure one pair and put its figures into ``result``, also when interrupted."""
    pair = find_pair(name, args)
    llm = LLM(pair.target, draft="none", dtype=args.dtype, device=args.device, max_batch_size=1)
    limit = llm.target.max_positions - args.max_tokens - 2 * DRAFT_LENGTH
    load = real.load_suites if name == real.NAME else load_suites
    names = args.suites.split(",")
    suites = load(args.prompts_dir, names, llm.tokenizer, args.per_suite, limit)
    prompts = [(suite, ids) for suite, many in suites.items() for ids in many]
    settings = {"model": name, "source": args.prompts_dir, "prompts": len(prompts), "lossy": False}
    settings["max_tokens"] = args.max_tokens
    record = HeatRecord()
    try:
        measure(llm, pair, args, prompts, record)
    finally:
        methods = {m.name: m for part in parts_of(pair, args) for m in part.methods}
        found = BenchResult.of([*methods.values()], settings, llm, record, None)
        result[name] = figures([*found.rows]) | {"texts": found.texts.counts}
        if found.rows:
            print_report(report_of(found), out)


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
