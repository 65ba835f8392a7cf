"""Past this machine: throughput and latency against load, of models that do not fit here.

The real scheduler, cache accounting and adaptive length, in simulated time: forwards take what a
roofline of an H100 or H200 says (scale_costs.py), drafts are accepted by chance (scale_replica.py).
Plain decoding stands beside drafts of three tokens and the engine's own choice.

    python benchmarks/scale.py                        # all of docs/guides/scale.md: some minutes
    python benchmarks/scale.py --chips h100 --models 8b --seconds 5
    python benchmarks/scale.py --capacity --chips h100 --models 8b    # a sheet, by formula

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from measuring import finish
from paceline.lab.report.document import Report, Table, Text
from paceline.lab.report.render import print_report
from scale_costs import CHIPS, HEADS, TARGETS, Roofline, Rows
from scale_replica import Figures, Replica, Traffic

WAYS: dict[str, int | str] = {"plain": 0, "3 tokens": 3, "auto": "auto"}
CHIPS_OF = {"8b": 1, "70b": 8}
LOADS = (2, 8, 16, 32)  # requests a second
CLIENTS = (1, 8, 32, 64, 128)  # in a closed loop: batches that are always full
FEWEST = 60
ACCEPTED = (0.5, 0.7, 0.85)
# Of closed loops: the way, and how many drafted tokens are accepted.
FULL = (("plain", 0.7), *((way, rate) for way in ("3 tokens", "auto") for rate in ACCEPTED))
SHEET_BATCHES, REPLICAS = (8, 32, 64, 128), (1, 2, 4, 8, 16)
BURSTS = {"Poisson": 1.0, "bursts": 4.0}


@dataclass(frozen=True)
class Cell:
    """What was simulated, and what came out. ``load``: requests a second or, where ``arrivals``
    are "closed", requests at a time."""

    chip: str
    model: str
    arrivals: str
    load: float
    way: str
    acceptance: float
    figures: Figures


def machine(chip: str, model: str) -> Roofline:
    return Roofline(CHIPS[chip], TARGETS[model], HEADS[model], CHIPS_OF[model])


def replica(costs: Roofline, way: int | str, batch: int) -> Replica:
    return Replica(costs, way, batch, min(costs.cached_tokens, batch * 4096))


def simulate(
    costs: Roofline, way: int | str, traffic: Traffic, load: float, seconds: float, batch: int
) -> Figures:
    """What comes in ``seconds`` at ``load`` a second, FEWEST at least, and until it is answered.

    The requests are the same whatever the way.
    """
    count = max(FEWEST, round(load * seconds))
    return replica(costs, way, batch).run(traffic.requests(count, load, seed=1))


def full(costs: Roofline, way: int | str, acceptance: float, clients: int) -> Figures:
    """``clients`` that each send their next request when one is answered."""
    count = 2 * clients + max(8, clients // 2)
    requests = Traffic(output=128, acceptance=acceptance).requests(count, 1.0, seed=1)
    return replica(costs, way, clients).run(requests, clients)


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Lazily: each is some seconds' work."""
    for chip in args.chips:
        for model in args.models:
            costs = machine(chip, model)
            for clients in args.clients:
                for way, rate in FULL:
                    figures = full(costs, WAYS[way], rate, clients)
                    yield Cell(chip, model, "closed", clients, way, rate, figures)
            for arrivals, burst in BURSTS.items():
                traffic = Traffic(acceptance=args.acceptance, burst=burst)
                for load in args.loads:
                    for way, length in WAYS.items():
                        how = traffic, load, args.seconds, args.batch
                        figures = simulate(costs, length, *how)
                        yield Cell(chip, model, arrivals, load, way, args.acceptance, figures)


def by_plain(
    corner: str, ways: list[str], rates: dict[str, tuple[float, list[float]]], note: str
) -> Table:
    """Where drafts stop paying: tokens a second of plain decoding, and of drafts by that."""
    rows = [
        [key, f"{plain:,.0f}", *(f"{rate / plain:.2f}" for rate in drafted)]
        for key, (plain, drafted) in rates.items()
    ]
    return Table([corner, "plain tokens/s", *ways], rows, note=note)


def full_table(cells: list[Cell]) -> Table:
    by = {(cell.load, cell.way, cell.acceptance): cell.figures.rate for cell in cells}
    plain, *drafted = FULL
    rates = {
        f"{load:g}": (by[(load, *plain)], [by[(load, *way)] for way in drafted])
        for load in dict.fromkeys(load for load, _, _ in by)
    }
    note = "Tokens a second by plain decoding's; behind the comma how many drafted are accepted."
    return by_plain("at a time", [f"{way}, {rate:g}" for way, rate in drafted], rates, note)


def load_table(cells: list[Cell]) -> Table:
    """Latencies of plain decoding, drafts of three tokens, and the engine's choice."""
    by = {(cell.arrivals, cell.load, cell.way): cell.figures for cell in cells}
    shown: dict[str, Callable[[Figures], str]] = {
        "ms a token": lambda f: f"{1e3 * f.token_gap:.1f}",
        "first token ms (95 %)": lambda f: f"{1e3 * f.first_token_95:.0f}",
        "request s (95 %)": lambda f: f"{f.request_95:.1f}",
        "sequences a step": lambda f: f"{f.sequences:.0f}",
    }
    rows = [
        [arrivals, f"{load:g}"]
        + [" / ".join(said(by[arrivals, load, way]) for way in WAYS) for said in shown.values()]
        for arrivals, load in dict.fromkeys((arrivals, load) for arrivals, load, _ in by)
    ]
    return Table(["arrivals", "requests/s", *shown], rows, note=" / ".join(WAYS))


def report(cells: list[Cell], args: argparse.Namespace) -> Report:
    shown = Report("Throughput and latency against load (computed)")
    shown.add(
        "Assumed",
        Text(
            f"Arrivals of {args.seconds:g} s, batches of up to {args.batch}, {args.acceptance:g} "
            "of drafted tokens accepted on average. Nothing here was measured."
        ),
    )
    for chip, model in dict.fromkeys((cell.chip, cell.model) for cell in cells):
        of_model = [cell for cell in cells if (cell.chip, cell.model) == (chip, model)]
        closed = [cell for cell in of_model if cell.arrivals == "closed"]
        by_load = [cell for cell in of_model if cell.arrivals != "closed"]
        title = f"{TARGETS[model].name} on {CHIPS_OF[model]} x {CHIPS[chip].name}"
        shown.add(f"{title}: batches always full", full_table(closed))
        shown.add(f"{title}: by load", load_table(by_load))
    return shown


def sheet(costs: Roofline, batch: int, drafted: int, acceptance: float) -> tuple[float, float]:
    """Tokens a second of a replica whose batch is full, and seconds of a step without prompts.

    A step takes its forwards and the host; on the way to each token stands the share of a prompt
    that must be read for it::

        rate = b t / (step + (b t / output) * reading),   t = 1 + a + ... + a^drafted
    """
    traffic = Traffic()
    tokens = sum(acceptance**position for position in range(drafted + 1))
    context = traffic.prompt + traffic.output // 2
    work = [Rows(1 + drafted, context)] * batch
    step = costs.forward(work) + costs.host(work)
    step += drafted * costs.draft_pass([Rows(1, context)] * batch)
    # Beside the others a prompt's rows add their arithmetic; the weights are read anyway.
    alone = costs.forward([Rows(1, context)])
    reading = costs.forward([Rows(traffic.prompt, 0)]) - alone
    reading += costs.draft_pass([Rows(traffic.prompt, 0)]) if drafted else 0.0
    gained = batch * tokens
    return gained / (step + gained / traffic.output * max(reading, 0.0)), step


def where_it_stops(costs: Roofline) -> Table:
    """Full batches with drafts of some tokens, by plain decoding's rate."""
    ways = [(drafted, rate) for drafted in (1, 3, 5) for rate in ACCEPTED]
    rates = {
        str(batch): (sheet(costs, batch, 0, 0.0)[0], [sheet(costs, batch, *way)[0] for way in ways])
        for batch in (1, 8, 32, 64, 128, 256)
    }
    note = "Drafted tokens, and how many of them are accepted."
    return by_plain("batch", [f"{drafted} at {rate:g}" for drafted, rate in ways], rates, note)


def capacity(args: argparse.Namespace) -> dict[str, Any]:
    """The sheet of docs/guides/deploy.md: what replicas serve, by the formula of ``sheet``."""
    shown = Report("Capacity (computed)")
    figures: dict[str, Any] = {}
    for chip in args.chips:
        for model in args.models:
            rows: list[list[str]] = []
            for batch in SHEET_BATCHES:
                for drafted in (0, 3):
                    rate, step = sheet(machine(chip, model), batch, drafted, args.acceptance)
                    figures[f"{chip} {model} {batch} {drafted}"] = rate
                    many = [f"{count * rate:,.0f}" for count in REPLICAS]
                    asked = f"{rate / Traffic().output:.1f}"
                    rows.append([str(batch), str(drafted), f"{1e3 * step:.1f}", asked, *many])
            columns = ["batch", "drafted", "ms a step", "requests/s of one"]
            columns += [f"tokens/s of {count}" for count in REPLICAS]
            title = f"{TARGETS[model].name} on {CHIPS_OF[model]} x {CHIPS[chip].name} a replica"
            stops = where_it_stops(machine(chip, model))
            shown.add(title, Table(columns, rows), stops)
    print_report(shown, Console())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--chips", nargs="+", choices=[*CHIPS], default=[*CHIPS])
    add("--models", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    add("--loads", nargs="+", type=float, default=LOADS, help="requests a second")
    add("--clients", nargs="+", type=int, default=CLIENTS, help="of closed loops")
    add("--seconds", type=float, default=10.0, help="of arrivals (default: 10)")
    add("--batch", type=int, default=128, help="max_batch_size (default: 128)")
    add("--acceptance", type=float, default=0.7, help="mean, by token (default: 0.7)")
    add("--capacity", action="store_true", help="a sheet, by a formula")
    add("--json", help="also write the figures here")
    args = parser.parse_args()
    if args.capacity:
        figures = capacity(args)
    else:
        console = Console(stderr=True)
        of_model = len(FULL) * len(args.clients) + len(BURSTS) * len(WAYS) * len(args.loads)
        total = len(args.chips) * len(args.models) * of_model
        simulated = list(track(cells(args), "simulating", total=total, console=console))
        print_report(report(simulated, args), Console())
        figures = {
            "assumed": asdict(machine(args.chips[0], args.models[0])),
            "cells": [asdict(cell) for cell in simulated],
        }
    finish(figures, args.json)


if __name__ == "__main__":
    main()
