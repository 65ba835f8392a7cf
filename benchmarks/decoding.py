"""Decoding speed: Paceline beside transformers, in one process, taking turns, medians.

Pairs: `tiny`, the embedded pair as it is, `inflated`, the same functions at the cost of real models
(see inflate.py), and `smollm2`, a real model, whose answers end where it ends them (see real.py).
Every contestant gets the same token ids, decodes greedily at batch 1 to exactly `--max-tokens` new
tokens (the end token is ignored by all, but for `smollm2`), and is timed from prompt to last token,
prefill included. Within each round all contestants decode a prompt one after another, in an order
that rotates; a figure is the median over rounds. Prefix sharing between rounds is off.

    python benchmarks/decoding.py --quick
    python benchmarks/decoding.py --pairs tiny --rounds 5 --json tiny.json
    python benchmarks/decoding.py --pairs smollm2 --json smollm2.json

The last line of the output is one JSON object. Ctrl-C prints what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local folders

import torch
from rich.console import Console

import contestants as c
import inflate
import real
from paceline.lab.bench.runs import Ask, BenchEngine
from prompts import SUITES, Prompt, default_folder, load_suites
from record import Record, kinships
from report import ADAPTIVE, BATCH, FIXED, PLAIN, SAMPLED, THEIRS, figures, machine, progress, show

RULES = ("token", "block", "coupled")


@dataclass(frozen=True)
class Job:
    """One prompt (or batch) that a set of contestants decodes in every round."""

    suite: str
    index: int
    asks: tuple[Ask, ...]
    contestants: list[BenchEngine]


@dataclass
class Field:
    """The loaded contestants of one pair."""

    single: list[BenchEngine]
    batched: list[BenchEngine]
    sampled: list[BenchEngine]
    judge: Any  # the transformers module, for near ties
    fixed: Any  # the LLM whose steps are timed last


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, 2 rounds, some minutes")
    parser.add_argument(
        "--pairs", default="tiny,inflated", help=f"tiny, inflated, both, or {real.NAME}"
    )
    real.add_perturb(parser)
    parser.add_argument("--target", help=f"default: paceline/tiny, or {real.TARGET}")
    parser.add_argument("--draft", help="a draft model; default: the target's, with -draft")
    parser.add_argument("--eagle3", help=f"head of {real.NAME}, or none; default: the published")
    parser.add_argument("--presets", default="target,draft", help="sizes of the inflated pair")
    parser.add_argument("--suites", help="comma-separated; see README.md for the defaults")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--per-suite", type=int, help="prompts a suite")
    parser.add_argument("--prompts-dir", default=str(default_folder()))
    parser.add_argument("--lookup", action="store_true", help="also transformers' prompt lookup")
    parser.add_argument("--rules", action=argparse.BooleanOptionalAction, help="sampled rules too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", help="file to write the JSON object to")
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


def find_pair(name: str, args: argparse.Namespace) -> c.Pair:
    """The folders of a pair; inflated ones are written on first use.

    The real model drafts with its EAGLE-3 head, else its draft model, else n-grams.
    """
    if name == real.NAME:
        folder = real.target_folder(args.target, args.perturb)
        draft = real.find("draft", args.draft)
        head = real.find("eagle3", args.eagle3)
        spec = f"eagle3:{head}" if head else "" if draft else "ngram"
        ends = real.ends_of(folder)
        return c.Pair(
            name, folder, Path(draft) if draft else None, args.device, args.dtype, spec, ends
        )
    target, draft = inflate.resolve(args.target), inflate.resolve(args.draft)
    if name == "inflated":
        sizes = [inflate.PRESETS[preset] for preset in args.presets.split(",")]
        target, draft = inflate.inflate(target, sizes[0]), inflate.inflate(draft, sizes[1])
    return c.Pair(name, target, draft, args.device, args.dtype)


def load(pair: c.Pair, args: argparse.Namespace) -> Field:
    """Load every contestant of a pair."""
    judge = c.load_transformers(pair.target, pair)
    theirs: list[BenchEngine] = [c.theirs(THEIRS, judge, pair.ends)]
    if pair.draft is not None:
        theirs.append(c.assisted(judge, c.load_transformers(pair.draft, pair), pair.ends))
    if args.lookup:
        theirs.append(c.lookup(judge, pair.ends))
    fixed = c.build_llm(pair, rule="token")  # at temperature 0 the rule makes no difference
    plain = c.ours(PLAIN, c.build_llm(pair, draft=False))
    adaptive = c.ours(ADAPTIVE, c.build_llm(pair, length="auto"))
    sampled: list[BenchEngine] = []
    if args.rules:
        sampled.append(plain)
        for rule in RULES:
            llm = fixed if rule == "token" else c.build_llm(pair, rule=rule)
            sampled.append(c.ours(f"rule {rule}", llm))
    ours: list[BenchEngine] = [plain, c.ours(FIXED, fixed), adaptive]
    return Field([*theirs, *ours], [plain, adaptive], sampled, judge, fixed)


def jobs(
    field: Field, suites: dict[str, list[Prompt]], max_tokens: int, ends: bool = False
) -> Iterator[Job]:
    """All prompts alone, then sampled, then eight together. `ends`: answers end by themselves."""
    for suite, prompts in suites.items():
        for index, prompt in enumerate(prompts):
            asks = c.asks([prompt.token_ids], max_tokens, ends=ends)
            yield Job(suite, index, asks, field.single)
    if field.sampled:
        for suite, prompts in suites.items():
            for index, prompt in enumerate(prompts):
                asks = c.asks([prompt.token_ids], max_tokens, 1.0, ends)
                yield Job(SAMPLED + suite, index, asks, field.sampled)
    together = [p.token_ids for prompts in suites.values() for p in prompts]
    together = (together * 8)[:: max(1, len(together) // 8)][:8]  # of all suites alike
    yield Job(BATCH, 0, c.asks(together, max_tokens, ends=ends), field.batched)


def _shortened(asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """The same for some tokens only, to warm up with."""
    few = min(16, asks[0].params.max_tokens)
    return tuple(replace(ask, params=replace(ask.params, max_tokens=few)) for ask in asks)


def measure(pair: str, todo: list[Job], args: argparse.Namespace, record: Record) -> None:
    """Decode everything `--rounds` times, contestants taking turns; fills the record."""
    warm: set[tuple[int, int, float]] = set()
    with progress() as bar:
        task = bar.add_task(pair, total=args.rounds * sum(len(j.contestants) for j in todo))
        for turn in range(args.rounds):
            for job in todo:
                shift = (turn + job.index) % len(job.contestants)
                for contestant in job.contestants[shift:] + job.contestants[:shift]:
                    key = (id(contestant), len(job.asks), job.asks[0].params.temperature)
                    bar.update(task, description=f"{pair} {job.suite}: {contestant.name}")
                    if key not in warm:  # buffers, kernels, lazy imports
                        contestant.run(_shortened(job.asks))
                        warm.add(key)
                    outcome = contestant.run(job.asks)
                    wanted = args.max_tokens * len(job.asks)
                    ends = not job.asks[0].params.ignore_eos
                    assert outcome.tokens == wanted or (ends and outcome.tokens < wanted), (
                        f"{contestant.name} wrote {outcome.tokens} tokens, not {wanted}"
                    )
                    record.add(job.suite, contestant.name, job.index, outcome)
                    bar.advance(task)


def run_pair(name: str, args: argparse.Namespace, result: dict[str, Any], out: Console) -> None:
    """Measure one pair and put its figures into `result`, also when interrupted."""
    from transformers import AutoConfig, AutoTokenizer

    from stepclock import overhead

    pair = find_pair(name, args)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    positions = AutoConfig.from_pretrained(pair.target).max_position_embeddings
    limit = positions - args.max_tokens - 2 * c.DRAFT_LENGTH
    names = args.suites.split(",")
    if name == real.NAME:
        suites = real.load_suites(args.prompts_dir, names, tokenizer, args.per_suite, limit)
    else:
        suites = load_suites(args.prompts_dir, names, tokenizer, args.per_suite, limit)
    field = load(pair, args)
    record = Record()
    try:
        measure(name, list(jobs(field, suites, args.max_tokens, bool(pair.ends))), args, record)
    except KeyboardInterrupt:
        result[name] = figures(record)
        show(name, record, result[name], out)
        raise
    result[name] = figures(record)
    ids = {suite: [p.token_ids for p in prompts] for suite, prompts in suites.items()}
    for key, names in {
        "plain_equals_transformers": (THEIRS, PLAIN),
        "speculative_equals_plain": (PLAIN, FIXED),
        "adaptive_equals_plain": (PLAIN, ADAPTIVE),
    }.items():
        result[name][key] = {s: kinships(record, s, names, ids[s], field.judge) for s in ids}
    if pair.device == "cpu":  # a GPU's calls return before the work is done
        prompts = [rows[0] for rows in ids.values()]
        result[name] |= overhead(field.fixed, prompts, args.max_tokens)
    show(name, record, result[name], out)


def main() -> None:
    """Measure as the command line says."""
    from paceline.errors import PacelineError

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
    line = json.dumps(result | {"machine": about})
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
