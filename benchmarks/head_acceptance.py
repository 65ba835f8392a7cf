"""Acceptance of the real model's drafts in our engine: tokens per target step, set by set.

Every drafter decodes the same prompts at a fixed draft length, several together, until the model
ends its answer or ``--max-tokens``. The step that reads the prompt does not count, because a head
cannot draft before it. Plain decoding would have exactly 1: the target's own (bonus) token of a
step counts, and tokens beyond the end of an answer do not. Heads that can are measured as
chains of ``--length`` and as dynamic trees of ``--nodes`` nodes and ``--depth`` levels.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import real
from entrants import Entrant, Entry, Run, load_target
from paceline.draft.spec import Loading
from paceline.errors import PacelineError
from report import mean, rounded

# What was asked of the EAGLE-3 head: mean tokens a step over the sets, and on every set.
WANTED = {"eagle3 chain": 2.4, "eagle3 tree": 2.8}
WANTED_EVERYWHERE = 2.0

Figures = dict[str, dict[str, Run]]  # row -> set -> what it did


def rows(args: argparse.Namespace) -> list[Entry]:
    """Chains and trees of all drafts that are here; ``levels`` is the draft length."""
    chain, nodes = f"chain {args.length}", f"tree {args.nodes}"
    tree = f",nodes={args.nodes},width={args.width}"
    found = []
    if eagle3 := real.find("eagle3", args.eagle3):
        found.append(Entry(f"eagle3 {chain}", f"eagle3:{eagle3},nodes=0", args.length))
        found.append(Entry(f"eagle3 {nodes}", f"eagle3:{eagle3}{tree}", args.depth))
    if draft := real.find("draft", args.draft):
        found.append(Entry(f"draft {chain}", f"model:{draft}", args.length))
        found.append(Entry(f"draft {nodes}", f"tree:{draft}{tree}", args.depth))
    if medusa := real.find("medusa", args.medusa):
        found.append(Entry(f"medusa {nodes}", f"medusa:{medusa},nodes={args.nodes}", args.depth))
    if not found:
        raise SystemExit("error: no drafts to measure; name some with --eagle3, --draft, --medusa")
    return found


def measure(args: argparse.Namespace, figures: Figures, about: dict[str, Any]) -> None:
    """Fills ``figures`` row by row, so that Ctrl-C leaves what was measured."""
    from prompts import PARTS

    entries = rows(args)
    loading: Loading = load_target(str(real.target_folder(args.target)), args.dtype, args.device)
    deepest = max(entry.levels for entry in entries)
    limit = loading.target.max_positions - args.max_tokens - deepest - 1
    sets = [name for name in args.suites.split(",") if name]
    suites = real.load_suites(args.prompts_dir, sets, loading.tokenizer, args.per_suite, limit)
    about["prompts"] = {name: len(prompts) for name, prompts in suites.items()}
    about["from_spec_bench"] = [name for name in suites if name in PARTS]
    ends = real.end_tokens(loading)
    console = Console(stderr=True)
    for entry in entries:
        entrant = Entrant(entry, loading, entry.levels, args.batch)
        figures[entry.name] = {}
        todo = list(suites.items())
        for name, prompts in track(todo, entry.name, console=console, transient=True):
            ids = [prompt.token_ids for prompt in prompts]
            run = entrant.run(ids, args.max_tokens, args.temperature, ends)
            figures[entry.name][name] = run
            shown = rounded(run.decoding_length, 2)
            console.print(f"{entry.name}, {name}: {shown} tokens a step", highlight=False)


def summary(figures: Figures) -> dict[str, Any]:
    """row -> set -> figures, and their mean over the sets."""
    result: dict[str, Any] = {}
    for row, sets in figures.items():
        result[row] = {
            name: {
                "mean_accepted_length": rounded(run.decoding_length),
                "per_position": [rounded(share) for share in run.by_position],
                "tokens": run.tokens,
                "requests": run.requests,
                "seconds": rounded(run.seconds, 1),
            }
            for name, run in sets.items()
        }
        lengths = mean([run.decoding_length for run in sets.values()])
        result[row]["mean"] = {"mean_accepted_length": rounded(lengths)}
    return result


def verdicts(figures: Figures) -> list[str]:
    """Each expectation of the EAGLE-3 head, met or missed."""
    lines = []
    for row, sets in figures.items():
        lengths = {n: r.decoding_length for n, r in sets.items() if r.decoding_length is not None}
        wanted = next((value for name, value in WANTED.items() if row.startswith(name)), None)
        if wanted is None or not lengths:
            continue
        found = mean(list(lengths.values())) or 0.0
        least = min(lengths, key=lambda name: lengths[name])
        for what, value, goal in (
            (f"{row}: mean of {len(lengths)} sets", found, wanted),
            (f"{row}: least, {least}", lengths[least], WANTED_EVERYWHERE),
        ):
            verdict = "met" if value >= goal else "MISSED"
            lines.append(f"{verdict}: {what}: {value:.2f} against {goal:.2f} tokens a step")
    return lines


def table(figures: Figures) -> Table:
    sets = list(dict.fromkeys(name for row in figures.values() for name in row))
    grid = Table(title="tokens per target step, bonus token included", title_justify="left")
    for head in ("", *sets, "mean"):
        grid.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row, runs in figures.items():
        lengths = [runs[name].decoding_length if name in runs else None for name in sets]
        cells = ["" if v is None else f"{v:.2f}" for v in (*lengths, mean(lengths))]
        grid.add_row(row, *cells)
    return grid


def run(args: argparse.Namespace) -> None:
    """Measure as the command line says; the last line of the output is JSON."""
    figures: Figures = {}
    about: dict[str, Any] = {
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "bonus_token_counted": True,
    }
    status = 0
    try:
        measure(args, figures, about)
    except KeyboardInterrupt:
        print("interrupted: the figures below are of what was measured")
        status = 130
    except PacelineError as error:
        raise SystemExit(f"error: {error}") from None
    out = Console(width=max(100, Console().width))
    out.print(table(figures))
    for line in verdicts(figures):
        out.print(line, highlight=False, soft_wrap=True)
    line = json.dumps(summary(figures) | {"settings": about})
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")
    print(line)
    raise SystemExit(status)
