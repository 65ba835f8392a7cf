"""Computes the throughput of full batches of models that do not fit this machine.

A roofline model of an H100 or H200 estimates how long forwards take: a part of a forward takes the
longer of the times of its bytes and its arithmetic (Williams et al., 2009, "Roofline")::

    products   max(weights read, 2 * weights * rows) + 2 sums over all chips per layer
    attention  max(keys and values read, 4 * heads * width * rows * context)
    host       a fixed time per step and a time per sequence: our Python code

    python benchmarks/scale.py                        # all of docs/guides/scale.md
    python benchmarks/scale.py --chips h100 --models 8b

The last line of the output is one JSON object."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console

from measuring import finish
from paceline.lab.report.document import Report, Table
from paceline.lab.report.render import print_report

CHIPS_OF = {"8b": 1, "70b": 8}
ACCEPTED = (0.5, 0.7, 0.85)
SHEET_BATCHES, REPLICAS = (8, 32, 64, 128), (1, 2, 4, 8, 16)
PROMPT, OUTPUT = 512, 256  # tokens of a request, on average
BYTES = 2  # per number: bfloat16
MOST_DRAFTED = 16  # rows of a sequence; a sequence with more rows is in prefill


@dataclass(frozen=True)
class Chip:
    """Data sheet: dense bfloat16 FLOP/s, bytes/s of memory, and of links in one direction."""

    name: str
    flops: float
    bandwidth: float
    link: float


CHIPS = {
    "h100": Chip("H100 SXM", 989e12, 3.35e12, 450e9),
    "h200": Chip("H200 SXM", 989e12, 4.8e12, 450e9),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: weights per layer and of the output layer, and those of attention."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    layer_weights: float
    head_weights: float

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.width * BYTES

    @property
    def bytes(self) -> float:
        """Bytes of weights that a forward reads, without the input embeddings."""
        return BYTES * (self.layers * self.layer_weights + self.head_weights)


def llama(name: str, layers: int, hidden: int, inner: int, heads: int, vocab: int) -> Shape:
    """A shape of the Llama 3 family, which has eight key and value heads of width 128."""
    attention = hidden * (2 * heads + 2 * 8) * 128
    layer = attention + 3 * hidden * inner
    return Shape(name, layers, hidden, heads, 8, 128, layer, hidden * vocab)


TARGETS = {
    "8b": llama("8B", 32, 4096, 14336, 32, 128_256),
    "70b": llama("70B", 80, 8192, 28672, 64, 128_256),
}
# EAGLE-3 (Li et al., 2025): one layer of the target's shape that reads two hidden states, a layer
# that combines three of them, and a vocabulary of 32,000 tokens.
HEADS = {
    name: replace(
        target,
        name=f"EAGLE-3 of {target.name}",
        layers=1,
        layer_weights=target.layer_weights
        + target.hidden * (target.heads + 16) * 128
        + 3 * target.hidden**2,
        head_weights=target.hidden * 32_000,
    )
    for name, target in TARGETS.items()
}


class Rows(NamedTuple):
    """A sequence's part of a forward: its rows, and its cached tokens."""

    rows: int
    context: int


@dataclass(frozen=True)
class Roofline:
    """Estimates the seconds of a step. The target is split over ``chips``; the drafter is on one.

    Assumed, not measured: the shares of the data sheet's figures that products and reads reach, and
    the seconds of launching a layer's kernels, of a sum over chips, and of the host."""

    chip: Chip
    target: Shape
    drafter: Shape | None = None
    chips: int = 1
    arithmetic: float = 0.7
    reading: float = 0.8
    layer_seconds: float = 5e-6
    sum_seconds: float = 10e-6
    host_seconds: float = 1e-3
    sequence_seconds: float = 50e-6

    def _seconds(self, shape: Shape, work: Sequence[Rows], chips: int) -> float:
        rows = sum(part.rows for part in work)
        flops = self.chip.flops * self.arithmetic * chips
        bandwidth = self.chip.bandwidth * self.reading * chips
        weights = shape.layers * shape.layer_weights
        # Of a prompt only the last row has logits, of a draft all rows do.
        wanted = sum(part.rows if part.rows <= MOST_DRAFTED else 1 for part in work)
        arithmetic = 2 * (weights * rows + shape.head_weights * wanted) / flops
        products = max(shape.bytes / bandwidth, arithmetic)
        seen = sum(part.rows * (part.context + part.rows / 2) for part in work)
        read = sum(part.context + part.rows for part in work) * shape.kv_bytes
        attended = 4 * shape.layers * shape.heads * shape.width * seen
        attention = max(read / bandwidth, attended / flops)
        return products + attention + shape.layers * self.layer_seconds

    def forward(self, work: Sequence[Rows]) -> float:
        seconds = self._seconds(self.target, work, self.chips)
        if self.chips > 1:
            moved = 2 * (self.chips - 1) / self.chips * self.target.hidden * BYTES
            sums = self.sum_seconds + sum(part.rows for part in work) * moved / self.chip.link
            seconds += 2 * self.target.layers * sums
        return seconds

    def draft_pass(self, work: Sequence[Rows]) -> float:
        """One forward of the drafter."""
        return self._seconds(self.drafter, work, 1) if self.drafter is not None else 0.0

    def host(self, work: Sequence[Rows]) -> float:
        return self.host_seconds + self.sequence_seconds * len(work)


def machine(chip: str, model: str) -> Roofline:
    return Roofline(CHIPS[chip], TARGETS[model], HEADS[model], CHIPS_OF[model])


def sheet(costs: Roofline, batch: int, drafted: int, acceptance: float) -> tuple[float, float]:
    """Tokens per second of a replica with a full batch, and seconds of a step without prefill.

    A step consists of its forwards and the host's time; each token also takes its share of the
    prefill of a prompt::

        rate = b t / (step + (b t / output) * reading),   t = 1 + a + ... + a^drafted"""
    tokens = sum(acceptance**position for position in range(drafted + 1))
    context = PROMPT + OUTPUT // 2
    work = [Rows(1 + drafted, context)] * batch
    step = costs.forward(work) + costs.host(work)
    step += drafted * costs.draft_pass([Rows(1, context)] * batch)
    # In a batch, prefill only adds the arithmetic of its rows; the weights are read anyway.
    alone = costs.forward([Rows(1, context)])
    reading = costs.forward([Rows(PROMPT, 0)]) - alone
    reading += costs.draft_pass([Rows(PROMPT, 0)]) if drafted else 0.0
    gained = batch * tokens
    return gained / (step + gained / OUTPUT * max(reading, 0.0)), step


def where_it_stops(costs: Roofline) -> Table:
    """Throughput of plain decoding, and of drafts relative to it, by batch size."""
    ways = [(drafted, rate) for drafted in (1, 3, 5) for rate in ACCEPTED]
    rows = []
    for batch in (1, 8, 32, 64, 128, 256):
        plain, _ = sheet(costs, batch, 0, 0.0)
        by_plain = (f"{sheet(costs, batch, *way)[0] / plain:.2f}" for way in ways)
        rows.append([str(batch), f"{plain:,.0f}", *by_plain])
    columns = ["batch", "plain tokens/s", *(f"{drafted} at {rate:g}" for drafted, rate in ways)]
    return Table(columns, rows, note="Columns: drafted tokens at an acceptance rate.")


def capacity(args: argparse.Namespace) -> dict[str, float]:
    """The tables of docs/guides/deploy.md: throughput of replicas, and the gain of drafts."""
    shown = Report("Capacity (computed)")
    figures: dict[str, float] = {}
    for chip in args.chips:
        for model in args.models:
            rows: list[list[str]] = []
            for batch in SHEET_BATCHES:
                for drafted in (0, 3):
                    rate, step = sheet(machine(chip, model), batch, drafted, args.acceptance)
                    figures[f"{chip} {model} {batch} {drafted}"] = rate
                    many = [f"{count * rate:,.0f}" for count in REPLICAS]
                    asked = f"{rate / OUTPUT:.1f}"
                    rows.append([str(batch), str(drafted), f"{1e3 * step:.1f}", asked, *many])
            columns = ["batch", "drafted", "ms per step", "requests/s of one"]
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
    add(
        "--acceptance",
        type=float,
        default=0.7,
        help="mean acceptance rate per token (default: 0.7)",
    )
    add("--json", help="file to write the figures to")
    args = parser.parse_args()
    finish(capacity(args), args.json)


if __name__ == "__main__":
    main()
