"""Whether engines wrote the same text as plain decoding, and if not, why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from paceline.difference import Difference, explain
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.runner import Heat, HeatRecord
from paceline.lab.bench.runs import Ask
from paceline.llm import LLM

IDENTICAL, TIE, DIFFERENT = "identical", "near tie", "different"


@dataclass(frozen=True)
class MethodDivergence:
    """The text of ``method`` and that of plain decoding part here."""

    method: str
    category: str
    prompt: int
    concurrency: int
    temperature: float
    difference: Difference

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "is_tie": self.difference.is_tie}


@dataclass(frozen=True)
class Comparison:
    """Over all requests whose text is determined: greedy ones, and those with a seed.

    ``counts[method]`` says how many texts were identical, near ties or different.
    """

    counts: dict[str, dict[str, int]]
    partings: list[MethodDivergence]

    def different(self, method: str) -> list[MethodDivergence]:
        return [p for p in self.partings if p.method == method and not p.difference.is_tie]


Judge = Callable[[Ask, tuple[int, ...], tuple[int, ...]], Difference | None]


def judge_of(llm: LLM) -> Judge:
    """Re-scores a pair of texts by the target."""
    return lambda ask, left, right: explain(llm.target, ask.prompt, left, right, ask.params)


def compare(record: HeatRecord, judge: Judge, sampled: Collection[str] = ()) -> Comparison:
    """Every distinct pair of texts once.

    Greedy texts of all engines are compared; of requests with a temperature and a seed, only
    those of ``sampled``: the engines that draw as plain decoding does.
    """
    counts: dict[str, Counter[str]] = {}
    partings: list[MethodDivergence] = []
    seen: set[tuple[object, ...]] = set()
    for heat, place, name, left, right in _pairs(record, sampled):
        ask, job = heat.job.asks[place], heat.job
        key = (name, ask.prompt, ask.params.temperature, ask.params.seed, left, right)
        if key in seen:
            continue
        seen.add(key)
        found = None if left == right else judge(ask, left, right)
        verdict = IDENTICAL if found is None else TIE if found.is_tie else DIFFERENT
        counts.setdefault(name, Counter())[verdict] += 1
        if found is not None:
            partings.append(
                MethodDivergence(
                    name, job.category, job.index + place, job.concurrency, job.temperature, found
                )
            )
    return Comparison({name: dict(count) for name, count in counts.items()}, partings)


def _pairs(
    record: HeatRecord, sampled: Collection[str]
) -> Iterator[tuple[Heat, int, str, tuple[int, ...], tuple[int, ...]]]:
    """(heat, number of the request, engine, plain decoding's tokens, the engine's)."""
    for heat in record.heats:
        plain = heat.outcomes.get(PLAIN)
        if plain is None:
            continue
        for name, outcome in heat.outcomes.items():
            if name == PLAIN:
                continue
            for place, ask in enumerate(heat.job.asks):
                params = ask.params
                if params.greedy or (params.seed is not None and name in sampled):
                    left, right = plain.answers[place].tokens, outcome.answers[place].tokens
                    yield heat, place, name, left, right
