"""Figures from a record: medians over rounds, with their spread."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.engine.driver import column_sums
from paceline.lab.bench.runner import Heat, HeatRecord
from paceline.lab.bench.runs import TimedAnswer, TimedRun

OVERALL = "overall"


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

    ``acceptance[i]`` is conditional: of the ``reached[i]`` drafts that had a token to try at
    position i, all before it accepted, the share whose token was accepted. ``length`` is the mean
    number of tokens drafted a step. None where a engine does not say.
    """

    drafted: int | None
    accepted: int
    mean_accepted_length: float  # tokens a target step, the target's own included
    acceptance_rate: float | None
    length: float | None
    acceptance: tuple[float, ...]
    reached: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One method on one category at one concurrency and temperature. Times in seconds.

    ``speedup`` is over ``best_plain``, the fastest plain decoding in the same heats: the median of
    the rounds' ratios. ``time_to_first_token`` is the median over requests. ``inter_token_*`` are
    percentiles over tokens: the gap before a delivery, divided by the tokens delivered together;
    ``stall_p99`` is that of the undivided gaps. ``phases`` are seconds a step, of steps that read
    no prompt.
    """

    method: str
    category: str
    concurrency: int
    temperature: float
    rounds: int
    requests: int
    tokens: int
    tokens_per_second: Spread
    speedup: Spread
    best_plain: str
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


def rows(record: HeatRecord, plains: Collection[str]) -> list[Row]:
    """All figures: for each concurrency and temperature, each category and overall, each method.

    ``plains`` names the engines that decode plainly. Rounds that were cut short count only
    where there is no complete one.
    """
    figures: list[Row] = []
    for (concurrency, temperature), heats in _grouped(
        record.heats, lambda heat: (heat.job.concurrency, heat.job.temperature)
    ):
        slices = _grouped(heats, lambda heat: heat.job.category)
        if len(slices) != 1:
            slices.append((OVERALL, heats))
        for category, heats_of in slices:
            figures.extend(_slice(category, concurrency, temperature, heats_of, plains))
    return figures


def _slice(
    category: str,
    concurrency: int,
    temperature: float,
    heats: Sequence[Heat],
    plains: Collection[str],
) -> Iterable[Row]:
    turns = complete(heats)
    names = list(turns[0][0].outcomes)
    rates = {
        name: [merged([heat.outcomes[name] for heat in turn]).rate for turn in turns]
        for name in names
    }
    best = max(
        (name for name in names if name in plains), key=lambda name: statistics.median(rates[name])
    )
    for name in names:
        whole = merged([heat.outcomes[name] for turn in turns for heat in turn])
        gaps = [gap for answer in whole.answers for gap in gaps_of(answer)]
        shares = [gap / count for gap, count in gaps for _ in range(count)]
        ratios = [rate / other for rate, other in zip(rates[name], rates[best], strict=True)]
        yield Row(
            method=name,
            category=category,
            concurrency=concurrency,
            temperature=temperature,
            rounds=len(turns),
            requests=len(whole.answers),
            tokens=whole.tokens,
            tokens_per_second=Spread.of(rates[name]),
            speedup=Spread.of(ratios),
            best_plain=best,
            time_to_first_token=statistics.median(a.arrivals[0][0] for a in whole.answers),
            inter_token_p50=percentile(shares, 0.50),
            inter_token_p99=percentile(shares, 0.99),
            stall_p99=percentile([gap for gap, _ in gaps], 0.99),
            drafts=drafts_of(whole),
            phases=_phases(whole),
        )


def _grouped(heats: Iterable[Heat], key: Any) -> list[tuple[Any, list[Heat]]]:
    groups: dict[Any, list[Heat]] = {}
    for heat in heats:
        groups.setdefault(key(heat), []).append(heat)
    return list(groups.items())


def complete(heats: Sequence[Heat]) -> list[list[Heat]]:
    """The rounds in which as many jobs were done as in the fullest one."""
    turns = [heats_of for _, heats_of in _grouped(heats, lambda heat: heat.turn)]
    full = max(map(len, turns))
    return [turn for turn in turns if len(turn) == full]


def merged(outcomes: Sequence[TimedRun]) -> TimedRun:
    """Runs of one engine as one; ``drafted`` is None if it is in any of them."""
    drafted = [o.drafted for o in outcomes if o.drafted is not None]
    levels = [o.levels for o in outcomes if o.levels is not None]
    phases = dict.fromkeys((name for o in outcomes for name in o.phases), 0.0)
    return TimedRun(
        answers=[answer for o in outcomes for answer in o.answers],
        seconds=sum(o.seconds for o in outcomes),
        steps=sum(o.steps for o in outcomes),
        drafted=sum(drafted) if len(drafted) == len(outcomes) else None,
        levels=sum(levels) if len(levels) == len(outcomes) else None,
        accepted=sum(o.accepted for o in outcomes),
        reached=column_sums([o.reached for o in outcomes]),
        accepted_at=column_sums([o.accepted_at for o in outcomes]),
        phases={name: sum(o.phases.get(name, 0.0) for o in outcomes) for name in phases},
        decoding_steps=sum(o.decoding_steps for o in outcomes),
        decoding_slots=sum(o.decoding_slots for o in outcomes),
    )


def gaps_of(answer: TimedAnswer) -> list[tuple[float, int]]:
    """(seconds since the delivery before, tokens delivered), from the second delivery on."""
    return [
        (later - earlier, count)
        for (earlier, _), (later, count) in itertools.pairwise(answer.arrivals)
    ]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: the smallest value that ``share`` of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def drafts_of(outcome: TimedRun) -> DraftFigures:
    """What its drafts achieved."""
    steps, drafted = outcome.steps, outcome.drafted
    return DraftFigures(
        drafted=drafted,
        accepted=outcome.accepted,
        mean_accepted_length=outcome.tokens / steps if steps else 0.0,
        acceptance_rate=outcome.accepted / drafted if drafted else None,
        length=None if drafted is None or not steps else drafted / steps,
        acceptance=tuple(a / n for a, n in zip(outcome.accepted_at, outcome.reached, strict=True)),
        reached=tuple(outcome.reached),
    )


def _phases(outcome: TimedRun) -> dict[str, float]:
    steps = outcome.decoding_steps
    return {name: seconds / steps for name, seconds in outcome.phases.items()} if steps else {}


def idle(record: HeatRecord, speculative: Collection[str]) -> dict[str, str]:
    """Speculative methods that speculated in vain throughout the run, and what they lacked."""
    groups: dict[str, str] = {}
    for name in record.names():
        if name not in speculative:
            continue
        whole = merged([h.outcomes[name] for h in record.heats if name in h.outcomes])
        if whole.drafted == 0:
            groups[name] = "drafted nothing"
        elif whole.accepted == 0:
            groups[name] = "had none of its drafts accepted"
    return groups
