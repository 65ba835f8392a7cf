"""Past this machine: throughput and latency against load, of models that do not fit here.

The real scheduler, cache accounting and adaptive length, in simulated time: forwards take what a
roofline of an H100 or H200 says (scale_costs.py), drafts are accepted by chance (scale_replica.py).
Every table has plain decoding, drafts of a fixed length, and the engine's own choice.

    python benchmarks/scale.py                        # all of docs/scale.md: some minutes
    python benchmarks/scale.py --chips h100 --models 8b --seconds 5
    python benchmarks/scale.py --capacity --chips h100 --models 8b    # most that a replica serves
    python benchmarks/scale.py --check    # the same simulation of this machine, against it

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from paceline.tools.report.document import Report, Table, Text
from paceline.tools.report.terminal import print_report
from scale_costs import CHIPS, HEADS, TARGETS, Roofline
from scale_replica import Figures, Replica, Settings, Traffic

WAYS: dict[str, int | str] = {"plain": 0, "3 tokens": 3, "auto": "auto"}
CHIPS_OF = {"8b": 1, "70b": 8}
LOADS = (1, 4, 8, 16, 24, 32)  # requests a second
FEWEST = 60
LATEST, SLOWEST = 1.0, 0.05  # seconds: what counts as served, in `--capacity`
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
    costs: Roofline, way: int | str, traffic: Traffic, load: float, seconds: float, batch: int
) -> Figures:
    """What comes in ``seconds`` at ``load`` a second, FEWEST at least, and until it is answered.

    The requests are the same whatever the way.
    """
    count = max(FEWEST, round(load * seconds))
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
                for load in args.loads:
                    for way, length in WAYS.items():
                        found = simulate(costs, length, traffic, load, args.seconds, args.batch)
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
            f"Requests of {args.seconds:g} s a cell, batches of up to {args.batch}, "
            f"{args.acceptance:g} of drafted tokens accepted on average. Nothing here was measured."
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


def most(costs: Roofline, way: int | str, args: argparse.Namespace) -> tuple[float, Figures]:
    """The highest load, in whole requests a second, that keeps to LATEST and SLOWEST."""
    traffic = Traffic(acceptance=args.acceptance)
    low, high, kept = 0, 64, None
    while high - low > 1:
        load = (low + high) // 2
        found = simulate(costs, way, traffic, load, args.seconds, args.batch)
        if found.first_token_95 <= LATEST and found.token_gap <= SLOWEST:
            low, kept = load, found
        else:
            high = load
    assert kept is not None, "not even one request a second is served in time"
    return low, kept


def capacity(args: argparse.Namespace) -> dict[str, Any]:
    """A replica's most, and so many replicas': each gets its share of Poisson arrivals."""
    shown = Report("Capacity (computed)")
    figures: dict[str, Any] = {"latest": LATEST, "slowest": SLOWEST, "replicas": {}}
    for chip in args.chips:
        for model in args.models:
            rows = []
            for way in ("plain", "auto"):
                load, found = most(machine(chip, model), WAYS[way], args)
                figures["replicas"][f"{chip} {model} {way}"] = {"load": load, **asdict(found)}
                for count in (1, 2, 4, 8, 16):
                    rate = f"{count * found.rate:,.0f}"
                    rows.append([way, count, count * load, rate, f"{found.token_gap * 1e3:.1f}"])
            columns = ["drafts", "replicas", "requests/s", "tokens/s", "ms a token"]
            note = (
                f"95 % of first tokens within {LATEST:g} s, {SLOWEST * 1e3:g} ms a token at most."
            )
            title = f"{TARGETS[model].name} on {CHIPS_OF[model]} x {CHIPS[chip].name} a replica"
            shown.add(title, Table(columns, rows, note=note))
    print_report(shown, Console())
    return figures


def parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    own = argparse.ArgumentParser(description=summary)
    own.add_argument("--chips", nargs="+", choices=[*CHIPS], default=[*CHIPS])
    own.add_argument("--models", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    own.add_argument("--loads", nargs="+", type=float, default=LOADS, help="requests a second")
    own.add_argument("--seconds", type=float, default=10.0, help="of arrivals (default: 10)")
    own.add_argument("--batch", type=int, default=128, help="max_batch_size (default: 128)")
    own.add_argument("--acceptance", type=float, default=0.7, help="mean, by token (default: 0.7)")
    own.add_argument("--capacity", action="store_true", help="the most that a replica serves")
    own.add_argument("--check", action="store_true", help="predict this machine, and measure it")
    own.add_argument("--json", help="also write the figures here")
    return own


def main() -> None:
    args = parser().parse_args()
    if args.check:
        from scale_check import check

        figures = check(Console())
    elif args.capacity:
        figures = capacity(args)
    else:
        console = Console(stderr=True)
        total = len(args.chips) * len(args.models) * len(BURSTS) * len(WAYS) * len(args.loads)
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
