"""Figures from a record: medians over rounds, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import truediv
from typing import Any

import numpy as np

from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import Heat, HeatRecord, TimedAnswer, TimedRun, merged

OVERALL = "overall"
_FEWEST = 4  # prompts from which their differences tell something
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Spread:
    """The median over rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int, unit: str = "") -> str:
        """Half of what lies between the lowest and the highest round stands beside the median."""
        half = (self.high - self.low) / 2
        return f"{self.median:.{digits}f}{unit}" + (f" ±{half:.{digits}f}" if half else "")


@dataclass(frozen=True)
class DraftFigures:
    """What drafting achieved, over all rounds.

    ``acceptance[i]``: the share accepted of the ``reached[i]`` drafts that had a token to try at
    position i. ``length``: mean tokens drafted a step; None where an engine does not say.
    ``mean_accepted_length``: tokens a target step, the bonus token included;
    ``mean_accepted_tokens`` without the steps that read a prompt, as Spec-Bench counts.
    """

    drafted: int | None
    accepted: int
    mean_accepted_length: float
    mean_accepted_tokens: float | None
    acceptance_rate: float | None
    length: float | None
    acceptance: tuple[float, ...]
    reached: tuple[int, ...]

    @classmethod
    def of(cls, run: TimedRun) -> DraftFigures:
        counts, steps, tells = run.counts, run.counts.target_steps, run.tells_drafted
        first, later_steps = sum(a.arrivals[0][1] for a in run.answers), steps - len(run.answers)
        return cls(
            drafted=counts.drafted if tells else None,
            accepted=counts.accepted,
            mean_accepted_length=run.tokens_per_step,
            mean_accepted_tokens=(run.tokens - first) / later_steps if later_steps else None,
            acceptance_rate=counts.acceptance_rate,
            length=counts.drafted / steps if tells and steps else None,
            acceptance=tuple(counts.rates),
            reached=tuple(counts.reached_at),
        )


@dataclass(frozen=True)
class Row:
    """One method on one category at one concurrency and temperature. Times in seconds.

    ``speedup`` is over our plain decoding in the same heats (``heats`` a round). ``interval``: of
    95 %, by how prompts differ; None for few prompts, or several requests at once.
    ``mean_speedup`` is Spec-Bench's (speed.py): the mean over the heats of tokens a second, by that
    of plain decoding. ``inter_token_*`` are percentiles over tokens: the gap before a delivery,
    divided by the tokens delivered together; ``stall_p99`` is that of the undivided gaps.
    ``phases``: seconds a step, of steps that read no prompt.
    """

    method: str
    category: str
    concurrency: int
    temperature: float
    rounds: int
    heats: int
    requests: int
    tokens: int
    tokens_per_second: Spread
    speedup: Spread
    interval: tuple[float, float] | None
    mean_speedup: float
    time_to_first_token: float
    inter_token_p50: float | None
    inter_token_p99: float | None
    stall_p99: float | None
    drafts: DraftFigures
    phases: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())

    @property
    def python(self) -> float | None:
        """Share of a step that is scheduling, batching and bookkeeping."""
        return self.phases["other"] / self.step if self.step else None

    def cost_per_million(self, price: float) -> float:
        """For a machine that costs ``price`` an hour."""
        return price / 3600 / self.tokens_per_second.median * 1e6

    def record(self, price: float | None = None) -> dict[str, Any]:
        values = asdict(self)
        if price is not None:
            values["cost_per_million_tokens"] = self.cost_per_million(price)
        return values


def rows(record: HeatRecord) -> list[Row]:
    """By concurrency and temperature, category and overall, method. Rounds with fewer heats than
    others are left out."""
    figures: list[Row] = []
    for cell in dict.fromkeys((h.job.concurrency, h.job.temperature) for h in record.heats):
        heats = record.of(*cell)
        categories = dict.fromkeys(heat.job.category for heat in heats)
        parts = {name: [h for h in heats if h.job.category == name] for name in categories}
        if len(parts) != 1:
            parts[OVERALL] = heats
        for category, heats_of in parts.items():
            numbers = dict.fromkeys(heat.turn for heat in heats_of)
            by_turn = [[heat for heat in heats_of if heat.turn == n] for n in numbers]
            full = max(map(len, by_turn))
            turns = [turn for turn in by_turn if len(turn) == full]
            figures += [_row(category, turns, name) for name in turns[0][0].outcomes]
    return figures


def _row(category: str, turns: list[list[Heat]], name: str) -> Row:
    job = turns[0][0].job
    runs, plain_runs = (
        [[heat.outcomes[method] for heat in turn] for turn in turns] for method in (name, PLAIN)
    )
    rounds, plain = list(map(merged, runs)), list(map(merged, plain_runs))
    whole = merged(rounds)
    gaps = [gap for answer in whole.answers for gap in gaps_of(answer)]
    shares = [gap / count for gap, count in gaps for _ in range(count)]
    steps = whole.decoding.steps
    means = (
        [statistics.mean(run.rate for run in turn) for turn in of] for of in (runs, plain_runs)
    )
    return Row(
        method=name,
        category=category,
        concurrency=job.concurrency,
        temperature=job.temperature,
        rounds=len(turns),
        heats=len(turns[0]),
        requests=len(whole.answers),
        tokens=whole.tokens,
        tokens_per_second=Spread.of([run.rate for run in rounds]),
        speedup=Spread.of([a.rate / b.rate for a, b in zip(rounds, plain, strict=True)]),
        interval=_interval(turns, name) if job.concurrency == 1 else None,
        mean_speedup=statistics.median(map(truediv, *means)),
        time_to_first_token=statistics.median(a.arrivals[0][0] for a in whole.answers),
        inter_token_p50=percentile(shares, 0.50),
        inter_token_p99=percentile(shares, 0.99),
        stall_p99=percentile([gap for gap, _ in gaps], 0.99),
        drafts=DraftFigures.of(whole),
        phases={n: s / steps for n, s in whole.decoding.seconds.items()} if steps else {},
    )


def _interval(turns: Sequence[Sequence[Heat]], name: str) -> tuple[float, float] | None:
    """95 % of the ratio of all tokens by all seconds, prompts drawn anew (bootstrap)."""
    if name == PLAIN or len(turns[0]) < _FEWEST:
        return None
    sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for heat in (heat for turn in turns for heat in turn):
        fast, slow = heat.outcomes[name], heat.outcomes[PLAIN]
        figures = np.array([fast.tokens, fast.seconds, slow.tokens, slow.seconds])
        sums[heat.job.index] = sums.get(heat.job.index, np.zeros(4)) + figures
    table = np.stack(list(sums.values()))
    drawn = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    tokens, seconds, plain_tokens, plain_seconds = table[drawn].sum(1).T
    ratios = tokens / seconds * plain_seconds / plain_tokens
    low, high = np.quantile(ratios, _QUANTILES)
    return float(low), float(high)


def gaps_of(answer: TimedAnswer) -> list[tuple[float, int]]:
    """(seconds since the delivery before, tokens delivered), from the second delivery on."""
    return [(at - before, count) for (before, _), (at, count) in pairwise(answer.arrivals)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: the smallest value that ``share`` of them do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def idle(record: HeatRecord, speculative: Collection[str]) -> dict[str, str]:
    """Speculative methods that speculated in vain throughout the run, and what they lacked."""
    lacking: dict[str, str] = {}
    for name in speculative:
        whole = merged([h.outcomes[name] for h in record.heats if name in h.outcomes])
        if whole.answers and not whole.counts.accepted:
            drafted = whole.counts.drafted
            lacking[name] = "had none of its drafts accepted" if drafted else "drafted nothing"
    return lacking
