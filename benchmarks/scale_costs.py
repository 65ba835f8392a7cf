"""What forwards would take: a roofline of a chip and a model's shape.

A part of a forward takes as long as the slower of its bytes and its arithmetic (Williams et al.,
2009, "Roofline")::

    products   max(weights read, 2 * weights * rows) + 2 products' sums over all chips a layer
    attention  max(keys and values read, 4 * heads * width * rows * context)
    host       a fixed time a step, more for every sequence: ours, in Python
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.costs import CostCurve, TargetCosts

BYTES = 2  # of a number: bfloat16
MOST_DRAFTED = 16  # rows of a sequence; more are a prompt's


@dataclass(frozen=True)
class Chip:
    """As its data sheet says: dense bfloat16 FLOP/s, bytes/s of memory and of links, one way."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float


CHIPS = {
    "h100": Chip("H100 SXM", 989e12, 3.35e12, 80e9, 450e9),
    "h200": Chip("H200 SXM", 989e12, 4.8e12, 141e9, 450e9),
}


@dataclass(frozen=True)
class Shape:
    """Weights of all layers and of the output's layer, and what attention reads."""

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
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.width * BYTES

    @property
    def bytes(self) -> float:
        """That a forward reads; the table of input embeddings is as large as the output's layer."""
        return BYTES * (self.layers * self.layer_weights + self.head_weights)


def llama(name: str, layers: int, hidden: int, inner: int, heads: int, vocab: int) -> Shape:
    """The Llama 3 family: eight heads of keys and values, 128 wide."""
    attention = hidden * (2 * heads + 2 * 8) * 128
    layer = attention + 3 * hidden * inner
    return Shape(name, layers, hidden, heads, 8, 128, layer, hidden * vocab)


TARGETS = {
    "8b": llama("8B", 32, 4096, 14336, 32, 128_256),
    "70b": llama("70B", 80, 8192, 28672, 64, 128_256),
}
# EAGLE-3 (Li et al., 2025): one layer of the target's shape, which sees two hidden states, a layer
# that joins three of them, and a vocabulary of 32,000 tokens.
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
    """A sequence's part of a forward: its rows, and the tokens before them in the cache."""

    rows: int
    context: int


@dataclass(frozen=True)
class Roofline:
    """Seconds of the parts of a step. ``chips`` hold the target together; the drafter is on one.

    Assumed, not measured: what share of a data sheet's numbers products and reads reach, seconds
    to start a layer's kernels, of a sum over chips, and of the host.
    """

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
        # Only the last rows of prompts have logits: those of drafts all do.
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

    @property
    def cached_tokens(self) -> int:
        """That fit beside the weights, nine tenths of the memory being ours."""
        table = BYTES * self.target.head_weights
        drafter = self.drafter.bytes if self.drafter is not None else 0.0
        free = 0.9 * self.chip.memory * self.chips - self.target.bytes - table - drafter
        per_token = self.target.kv_bytes + (self.drafter.kv_bytes if self.drafter else 0)
        return int(free / per_token)


def as_start_up_measures(costs: Roofline, batch: int, longest: int) -> TargetCosts:
    """What the engine would measure at start-up: forwards over chains after 64 tokens."""
    counts = sorted({1, batch, *(2**power for power in range(10) if 2**power < batch)})
    rows = sorted({1 + n for n in (0, 1, 2, 4, 7, 15) if n <= longest} | {1 + longest})

    def curve(sequences: int) -> CostCurve:
        works = ([Rows(count, 64)] * sequences for count in rows)
        times = (costs.forward(work) + costs.host(work) for work in works)
        return CostCurve(tuple(rows), tuple(times))

    return TargetCosts(tuple(counts), tuple(map(curve, counts)))
