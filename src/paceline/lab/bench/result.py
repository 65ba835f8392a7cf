"""All that a benchmark found: figures (medians over rounds, with their spread), the texts beside
those of plain decoding, and the JSON object of it."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import truediv
from typing import Any

import numpy as np
from msgspec import to_builtins

from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.runner import Ask, Heat, Length, Method, TimedRun, merged
from paceline.lab.budget import Spending
from paceline.lab.certify.decoding import Difference, explain
from paceline.lab.report.document import Spread
from paceline.llm import LLM
from paceline.settings.tuned import MachineIdentity

OVERALL = "overall"
_FEWEST = 4  # prompts from which their differences tell something
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


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
    drafts: dict[str, Any]
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
        """Of new tokens, on a machine that costs ``price`` an hour."""
        return price / 3600 / self.tokens_per_second.median * 1e6

    def record(self, price: float | None) -> dict[str, Any]:
        cost = {} if price is None else {"cost_per_million_tokens": self.cost_per_million(price)}
        return asdict(self) | cost


def rows(record: list[Heat]) -> list[Row]:
    """By concurrency, temperature, category (and overall), method; without unfinished rounds."""
    figures: list[Row] = []
    cells: dict[tuple[int, float], list[Heat]] = {}
    for heat in record:
        cells.setdefault((heat.job.concurrency, heat.job.temperature), []).append(heat)
    for heats in cells.values():
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
    gaps = [gap for answer in whole.answers for gap in answer.gaps]
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
        drafts=draft_figures(whole),
        phases={n: s / steps for n, s in whole.decoding.seconds.items()} if steps else {},
    )


def draft_figures(run: TimedRun) -> dict[str, Any]:
    """What drafting achieved. ``acceptance[i]``: the share accepted of the ``reached[i]`` drafts
    that had a token to try at position i. ``length``: mean tokens drafted a step; None where an
    engine does not say. ``mean_accepted_length``: tokens a target step, the bonus token included;
    ``mean_accepted_tokens`` without the steps that read a prompt, as Spec-Bench counts."""
    counts, steps, tells = run.counts, run.counts.target_steps, run.tells_drafted
    first, later_steps = sum(a.arrivals[0][1] for a in run.answers), steps - len(run.answers)
    return {
        "drafted": counts.drafted if tells else None,
        "accepted": counts.accepted,
        "mean_accepted_length": run.tokens_per_step,
        "mean_accepted_tokens": (run.tokens - first) / later_steps if later_steps else None,
        "acceptance_rate": counts.acceptance_rate,
        "length": counts.drafted / steps if tells and steps else None,
        "acceptance": tuple(counts.rates),
        "reached": tuple(counts.reached_at),
        "not_drafted": dict(counts.not_drafted),
    }


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


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: the smallest value that ``share`` of them do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def idle(record: list[Heat], speculative: Collection[str]) -> dict[str, str]:
    """Speculative methods that speculated in vain throughout the run, and what they lacked."""
    lacking: dict[str, str] = {}
    for name in speculative:
        whole = merged([h.outcomes[name] for h in record if name in h.outcomes])
        if whole.answers and not whole.counts.accepted:
            drafted = whole.counts.drafted
            lacking[name] = "had none of its drafts accepted" if drafted else "drafted nothing"
    return lacking


KINDS = ("identical", "near tie", "different")


@dataclass(frozen=True)
class MethodDivergence:
    """The text of ``method`` and that of plain decoding part here."""

    method: str
    category: str
    prompt: int
    concurrency: int
    temperature: float
    difference: Difference

    @property
    def complaint(self) -> str:
        it = self.difference
        return (
            f"{self.method} wrote another text than {PLAIN} decoding ({self.category}, request "
            f"{self.prompt}, token {it.at}: {it.left} became {it.right}, their scores {it.gap:.3g} "
            f"apart, a rounding step is {it.step:.3g}); this is a bug, please report it"
        )


@dataclass(frozen=True)
class Comparison:
    """Over all requests whose text is determined: greedy ones, and those with a seed.
    ``counts[method]``: how many texts were identical, near ties or different."""

    counts: dict[str, dict[str, int]]
    partings: list[MethodDivergence]

    def different(self, method: str) -> list[MethodDivergence]:
        return [p for p in self.partings if p.method == method and not p.difference.is_tie]


Judge = Callable[[Ask, tuple[int, ...], tuple[int, ...]], Difference | None]


def compare(record: list[Heat], judge: Judge, sampled: Collection[str] = ()) -> Comparison:
    """Every distinct pair of texts once, of greedy requests, and with a seed those of the
    ``sampled`` methods, which draw as plain decoding does."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    partings: list[MethodDivergence] = []
    seen: set[tuple[object, ...]] = set()
    for heat in record:
        job, plain = heat.job, heat.outcomes[PLAIN]
        for name, run in heat.outcomes.items():
            for number, ask in enumerate(job.asks):
                params = ask.params
                left, right = plain.answers[number].tokens, run.answers[number].tokens
                key = (name, ask.prompt, params.temperature, params.seed, left, right)
                determined = params.greedy or (params.seed is not None and name in sampled)
                if name == PLAIN or not determined or key in seen:
                    continue
                seen.add(key)
                difference = None if left == right else judge(ask, left, right)
                kind = 0 if difference is None else 1 if difference.is_tie else 2
                counts[name][KINDS[kind]] += 1
                if difference is not None:
                    where = job.category, job.index + number, job.concurrency, job.temperature
                    partings.append(MethodDivergence(name, *where, difference))
    return Comparison({name: dict(count) for name, count in counts.items()}, partings)


@dataclass(frozen=True)
class BenchResult:
    """``idle``: what methods lacked that speculated in vain. ``unequal``: what could not be made
    equal, of other engines. ``left_out``: prompts too long for the model."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    methods: Sequence[Method]
    rows: Sequence[Row]
    texts: Comparison
    idle: dict[str, str]
    left_out: Sequence[str] = ()
    interrupted: bool = False
    spending: Spending | None = None
    unequal: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, methods: Sequence[Method], settings: dict[str, Any], llm: LLM, record: list[Heat]
    ) -> BenchResult:
        """From what was measured."""

        def judge(ask: Ask, left: tuple[int, ...], right: tuple[int, ...]) -> Difference | None:
            return explain(llm.target, ask.prompt, left, right, ask.params)

        ours = [m.name for m in methods if m.url is None]
        return cls(
            model=settings["model"],
            machine=machine_of(llm),
            settings=settings,
            methods=methods,
            rows=rows(record),
            texts=compare(record, judge, ours),
            idle=idle(record, [method.name for method in methods if method.draft]),
        )

    def record(self) -> dict[str, Any]:
        """Everything, for machines: medians and spreads, unrounded, in seconds."""
        texts, names = self.texts, ("model", "interrupted", "machine", "settings", "idle")
        partings = [{**asdict(p), "is_tie": p.difference.is_tie} for p in texts.partings]
        return {
            **{name: getattr(self, name) for name in names},
            "methods": [asdict(method) for method in self.methods],
            "figures": [row.record(self.price) for row in self.rows],
            "texts": {"counts": texts.counts, "partings": partings},
            "unequal": {name: dict(words) for name, words in self.unequal.items()},
            "bugs": self.bugs(),
            "prompts_left_out": list(self.left_out),
            "budget": self.spending and asdict(self.spending),
        }

    @property
    def price(self) -> float | None:
        """Of a machine hour."""
        return self.settings.get("price")

    def amount(self) -> str:
        """How many prompts the figures are of, and of how many."""
        wanted = int(self.settings["prompts"])
        measured = max((row.heats for row in self.rows if row.concurrency == 1), default=wanted)
        return f"{wanted} prompts" if measured >= wanted else f"{measured} of {wanted} prompts"

    def bugs(self) -> list[str]:
        """Methods of ours whose text is not plain decoding's, beyond what rounding explains."""
        return [
            method.name
            for method in self.methods
            if method.url is None and self.texts.different(method.name)
        ]

    def complaints(self, allow_idle: bool = False) -> list[str]:
        """One line for each thing that makes the run a failure."""
        lines = [self.texts.different(name)[0].complaint for name in self.bugs()]
        if not allow_idle:
            lengths = {method.name: method.length for method in self.methods}
            lines += [idle_line(name, lack, lengths[name]) for name, lack in self.idle.items()]
        return lines


def idle_line(name: str, lack: str, length: Length | None) -> str:
    """Why a method's figures are not speculation's, and what to do."""
    advice = "try other prompts or another draft"
    if lack == "drafted nothing" and length == "auto":
        advice = (
            "either the automatic length found drafting too dear here or the drafter had nothing "
            f"to propose; {name}@4 tells which"
        )
    return (
        f"{name} {lack} in the whole run, so its figures are those of plain decoding; {advice}, "
        "or accept this with --allow-idle"
    )


def machine_of(llm: LLM) -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before."""
    about: dict[str, Any] = to_builtins(MachineIdentity.of(llm.target))
    about["cores"] = os.cpu_count()
    if hasattr(os, "getloadavg"):
        about["load_before"] = os.getloadavg()[0]
    return about
