"""Draft acceptance in our engine: tokens per target step, set by set.

Every drafter decodes the same prompts at a fixed draft length, several together, until the model
ends its answer or `--max-tokens`. Tokens beyond the end of an answer do not count.

`tiny`: the embedded pair. `smollm2`: the real model's EAGLE-3 head, draft model and Medusa heads,
as chains of `--length` and as dynamic trees of `--nodes` nodes and `--depth` levels.

    python benchmarks/acceptance.py --target DIR --draft DIR --per-suite 20
    python benchmarks/acceptance.py --pairs smollm2 --eagle3 FOLDER

`mean_accepted_length` is tokens per target step, `mean_accepted_tokens` the same without the step
that reads the prompt, before which a head cannot draft: plain decoding has exactly 1. The table has
the first for `tiny` and the second for `smollm2`. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import real
from inflate import InflateError, resolve
from measuring import finish, mean, rounded
from paceline import LLM, PacelineError, SamplingParams
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.figures import DraftFigures
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runs import Ask
from paceline.lab.report.columns import number
from paceline.lab.report.document import Report, Table
from paceline.lab.report.render import print_report
from prompts import PARTS, SUITES, default_folder, load_suites

Figures = dict[str, dict[str, DraftFigures]]  # method -> set -> what its drafts achieved


def methods(args: argparse.Namespace) -> list[Method]:
    """Chains and trees of all drafts that are here, at fixed lengths."""
    if args.pairs != real.NAME:
        draft = resolve(args.draft or "paceline/tiny-draft")
        return [Method("draft", f"model:{draft}", args.length)]
    chain, nodes = f"chain {args.length}", f"tree {args.nodes}"
    tree = f",nodes={args.nodes},width={args.width}"
    found = []
    if eagle3 := real.find("eagle3", args.eagle3):
        found.append(Method(f"eagle3 {chain}", f"eagle3:{eagle3},nodes=0", args.length))
        found.append(Method(f"eagle3 {nodes}", f"eagle3:{eagle3}{tree}", args.depth))
    if draft := real.find("draft", args.draft):
        found.append(Method(f"draft {chain}", f"model:{draft}", args.length))
        found.append(Method(f"draft {nodes}", f"tree:{draft}{tree}", args.depth))
    if medusa := real.find("medusa", args.medusa):
        found.append(Method(f"medusa {nodes}", f"medusa:{medusa},nodes={args.nodes}", args.depth))
    if not found:
        raise SystemExit("error: no drafts to measure; name some with --eagle3, --draft, --medusa")
    return found


def measure(args: argparse.Namespace, figures: Figures, about: dict[str, Any]) -> None:
    """Fills ``figures`` method by method, so that Ctrl-C leaves what was measured."""
    todo = methods(args)
    is_real = args.pairs == real.NAME
    folder = real.target_folder(args.target) if is_real else resolve(args.target or "paceline/tiny")
    base = LLM(str(folder), draft="none", dtype=args.dtype, device=args.device, max_batch_size=1)
    longest = max(method.length for method in todo if isinstance(method.length, int))
    limit = base.target.max_positions - args.max_tokens - longest - 1
    load = real.load_suites if is_real else load_suites
    names = [name for name in args.suites.split(",") if name]
    sets = load(args.prompts_dir, names, base.tokenizer, args.per_suite, limit)
    about["prompts"] = {name: len(prompts) for name, prompts in sets.items()}
    about["from_spec_bench"] = [name for name in sets if name in PARTS]
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos
    )
    starter, console = Starter(base, str(folder)), Console(stderr=True)
    for method in todo:
        engine = starter.open(method, args.batch)
        figures[method.name] = {}
        for name, prompts in track([*sets.items()], method.name, console=console, transient=True):
            run = engine.run([Ask(tuple(ids), params) for ids in prompts])
            figures[method.name][name] = DraftFigures.of(run)


def key_of(args: argparse.Namespace) -> str:
    return "mean_accepted_tokens" if args.pairs == real.NAME else "mean_accepted_length"


def record_of(figures: Figures, key: str) -> dict[str, Any]:
    """method -> set -> figures, and their mean over the sets."""
    return {
        method: {name: asdict(one) for name, one in sets.items()}
        | {"mean": {key: rounded(mean([getattr(one, key) for one in sets.values()]))}}
        for method, sets in figures.items()
    }


def report(figures: Figures, key: str) -> Report:
    sets = list(dict.fromkeys(name for row in figures.values() for name in row))
    cells = []
    for method, runs in figures.items():
        values = [getattr(runs[name], key) if name in runs else None for name in sets]
        shown = [None if value is None else number(value) for value in (*values, mean(values))]
        cells.append([method, *shown])
    made = Report("Acceptance")
    made.add("Tokens per target step, bonus token included", Table(["", *sets, "mean"], cells))
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
    figures, status, key = Figures(), 0, key_of(args)
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
    print_report(report(figures, key), Console(width=max(100, Console().width)))
    finish(record_of(figures, key) | {"settings": about}, args.json)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
