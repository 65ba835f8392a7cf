"""What a benchmark's time bought: how much was measured, and how sure its speedups are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.tools.bench.figures import OVERALL, Row
from paceline.tools.bench.runner import Heat, HeatRecord
from paceline.tools.report.document import Table, Text

_FEWEST = 4  # prompts from which their differences tell something
_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class Sureness:
    """Between which speedups the truth lies with 95 %, judged by how prompts differ.

    ``low`` and ``high`` are None where there are too few prompts or several requests at once.
    """

    method: str
    concurrency: int
    temperature: float
    speedup: float
    low: float | None
    high: float | None
    prompts: int
    rounds: int


@dataclass(frozen=True)
class BenchSpending:
    """``seconds``: the budget of this run, None without; ``spent`` in all runs that went into the
    figures. Heats are those measured of those wanted: one prompt, or one crowd, by everybody."""

    seconds: float | None
    spent: float
    heats: int
    heats_wanted: int
    not_measured: tuple[str, ...]
    sureness: tuple[Sureness, ...]

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def blocks(self) -> list[Table | Text]:
        """For the report."""
        rows = [
            (
                item.method,
                item.concurrency,
                f"{item.temperature:g}",
                f"{item.speedup:.2f}x",
                None if item.low is None else f"{item.low:.2f} to {item.high:.2f}x",
                item.prompts,
                item.rounds,
            )
            for item in self.sureness
        ]
        columns = ("method", "at once", "temperature", "speedup", "95 %", "prompts", "rounds")
        note = "95 %: by drawing prompts anew (bootstrap): how far other such prompts may move it."
        line = f"{self.spent:.0f} s bought {self.heats} of {self.heats_wanted} turns of everybody."
        if self.not_measured:
            line += f" Not measured: {', '.join(self.not_measured)}. --continue goes on."
        return [Table(columns, rows, note=note), Text(line)]


def sureness_of(record: HeatRecord, rows: Sequence[Row]) -> tuple[Sureness, ...]:
    """Of every method's overall speedup; ``rows`` are the figures of the record."""
    found = []
    categories = {(row.concurrency, row.temperature, row.category) for row in rows}
    for row in rows:
        cell = row.concurrency, row.temperature
        alone = sum(key[:2] == cell for key in categories) == 1
        if row.method == row.best_plain or not (alone or row.category == OVERALL):
            continue
        heats = [h for h in record.heats if (h.job.concurrency, h.job.temperature) == cell]
        prompts = {heat.job.index for heat in heats}
        low, high = _interval(heats, row) if row.concurrency == 1 else (None, None)
        count = len(prompts) if row.concurrency == 1 else row.requests // row.rounds
        found.append(Sureness(row.method, *cell, row.speedup.median, low, high, count, row.rounds))
    return tuple(found)


def _interval(heats: Sequence[Heat], row: Row) -> tuple[float | None, float | None]:
    """Of the ratio of all tokens by all seconds, prompts drawn anew with replacement."""
    sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for heat in heats:
        own, plain = heat.outcomes[row.method], heat.outcomes[row.best_plain]
        figures = np.array([own.tokens, own.seconds, plain.tokens, plain.seconds])
        sums[heat.job.index] = sums.get(heat.job.index, np.zeros(4)) + figures
    if len(sums) < _FEWEST:
        return None, None
    table = np.stack(list(sums.values()))
    drawn = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    tokens, seconds, plain_tokens, plain_seconds = table[drawn].sum(1).T
    ratios = tokens / seconds * plain_seconds / plain_tokens
    low, high = np.quantile(ratios, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)
