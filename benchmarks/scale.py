"""Past this machine: throughput and latency against load, of models that do not fit here.

The real scheduler, cache accounting and adaptive length, in simulated time: forwards take what a
roofline of an H100 or H200 says (scale_costs.py), drafts are accepted by chance (scale_replica.py).
Every table has plain decoding, drafts of a fixed length, and the engine's own choice.

    python benchmarks/scale.py                        # all of docs/scale.md: some minutes
    python benchmarks/scale.py --chips h100 --models 8b --requests 100
    python benchmarks/scale.py --check    # the same simulation of this machine, against it

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import track

from paceline.tools.report.document import Report, Table, Text
from paceline.tools.report.terminal import print_report
from scale_costs import CHIPS, HEADS, TARGETS, Roofline
from scale_replica import Figures, Replica, Settings, Traffic

WAYS: dict[str, int | str] = {"plain": 0, "3 tokens": 3, "auto": "auto"}
CHIPS_OF = {"8b": 1, "70b": 8}
# Requests a second for each replica, around where plain decoding is full.
LOADS = {
    ("h100", "8b"): (1, 4, 8, 12, 16, 24),
    ("h200", "8b"): (1, 4, 8, 12, 16, 24),
    ("h100", "70b"): (1, 4, 8, 12, 16, 24),
    ("h200", "70b"): (1, 4, 8, 12, 16, 24),
}
BURSTS = {"Poisson": 1.0, "bursts": 4.0}


@dataclass(frozen=True)
class Cell:
    """What was simulated, and what came out."""

    chip: str
    model: str
    arrivals: str
    load: float
    way: str
    figures: Figures

    def row(self) -> list[str]:
        f = self.figures
        return [
            self.arrivals,
            f"{self.load:g}",
            self.way,
            f"{f.rate:,.0f}",
            f"{f.first_token * 1e3:,.0f} / {f.first_token_95 * 1e3:,.0f}",
            f"{f.token_gap * 1e3:.1f}",
            f"{f.request_95:.1f}",
            f"{f.sequences:.1f}",
            f"{f.tokens_a_step:.2f}",
            f"{100 * f.drafting_steps:.0f} %",
        ]


HEADINGS = [
    *("arrivals", "requests/s", "drafts", "tokens/s", "first token ms (mean / 95 %)"),
    *("ms a token", "request s (95 %)", "batch", "tokens a step", "steps with drafts"),
]


def machine(chip: str, model: str) -> Roofline:
    return Roofline(CHIPS[chip], TARGETS[model], HEADS[model], CHIPS_OF[model])


def simulate(
    costs: Roofline, way: int | str, traffic: Traffic, load: float, count: int, batch: int
) -> Figures:
    """``count`` requests at ``load`` a second, the same ones whatever the way."""
    settings = Settings(way, batch=batch, cached_tokens=min(costs.cached_tokens, batch * 4096))
    requests = traffic.requests(count, load, seed=1)
    return Replica(costs, settings, drafts=way != 0).run(requests)


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Lazily: each is some seconds' work."""
    for chip in args.chips:
        for model in args.models:
            costs = machine(chip, model)
            for arrivals, burst in BURSTS.items():
                traffic = Traffic(acceptance=args.acceptance, burst=burst)
                for load in args.loads or LOADS[chip, model]:
                    for way, length in WAYS.items():
                        found = simulate(costs, length, traffic, load, args.requests, args.batch)
                        yield Cell(chip, model, arrivals, load, way, found)


def pays_until(found: list[Cell], way: str) -> dict[str, float | None]:
    """By arrivals, the last load at which a way's tokens come sooner than plain decoding's."""
    plain = {(c.arrivals, c.load): c.figures.token_gap for c in found if c.way == "plain"}
    best: dict[str, float | None] = dict.fromkeys(c.arrivals for c in found)
    for cell in found:
        sooner = cell.figures.token_gap < 0.98 * plain[cell.arrivals, cell.load]
        if cell.way == way and sooner:
            best[cell.arrivals] = max(best[cell.arrivals] or 0.0, cell.load)
    return best


def report(found: list[Cell], args: argparse.Namespace) -> Report:
    shown = Report("Throughput and latency against load (computed)")
    shown.add(
        "Assumed",
        Text(
            f"{args.requests} requests a cell, batches of up to {args.batch}, {args.acceptance:g} "
            "of drafted tokens accepted on average. Nothing here was measured."
        ),
    )
    for chip, model in dict.fromkeys((cell.chip, cell.model) for cell in found):
        own = [cell for cell in found if (cell.chip, cell.model) == (chip, model)]
        ends = [
            Text(f"Drafts ({way}) bring tokens sooner up to, in requests/s: {said}.")
            for way in ("3 tokens", "auto")
            for said in [", ".join(f"{k} {v or 'never'}" for k, v in pays_until(own, way).items())]
        ]
        table = Table(HEADINGS, [cell.row() for cell in own])
        title = f"{TARGETS[model].name} on {CHIPS_OF[model]} x {CHIPS[chip].name}"
        shown.add(title, table, *ends)
    return shown


def parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    own = argparse.ArgumentParser(description=summary)
    own.add_argument("--chips", nargs="+", choices=[*CHIPS], default=[*CHIPS])
    own.add_argument("--models", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    own.add_argument("--loads", nargs="+", type=float, help="requests a second")
    own.add_argument("--requests", type=int, default=300)
    own.add_argument("--batch", type=int, default=64, help="max_batch_size")
    own.add_argument("--acceptance", type=float, default=0.7, help="mean, by token (default: 0.7)")
    own.add_argument("--check", action="store_true", help="predict this machine, and measure it")
    own.add_argument("--json", help="also write the figures here")
    return own


def main() -> None:
    args = parser().parse_args()
    if args.check:
        from scale_check import check

        figures = check(Console())
    else:
        console = Console(stderr=True)
        count = len(args.chips) * len(args.models) * len(BURSTS) * len(WAYS)
        total = count * len(args.loads or LOADS["h100", "8b"])
        found = list(track(cells(args), "simulating", total=total, console=console))
        print_report(report(found, args), Console())
        figures = {
            "assumed": asdict(machine(args.chips[0], args.models[0])),
            "cells": [{**asdict(cell), "tokens_per_second": cell.figures.rate} for cell in found],
        }
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
