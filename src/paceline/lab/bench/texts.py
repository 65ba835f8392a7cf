"""Whether engines wrote the same text as plain decoding, and if not, why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.runs import Ask, HeatRecord
from paceline.lab.certify.difference import Difference, explain
from paceline.llm import LLM

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
    """Every distinct pair of texts once, of requests that both were asked alike: after a near tie
    conversations go on differently.

    Greedy texts of all engines are compared; of requests with a temperature and a seed, only those
    of ``sampled``: the engines that draw as plain decoding does.
    """
    counts: dict[str, Counter[str]] = {}
    partings: list[MethodDivergence] = []
    seen: set[tuple[object, ...]] = set()
    for heat in (heat for heat in record.heats if PLAIN in heat.outcomes):
        job, plain = heat.job, heat.outcomes[PLAIN]
        for name, run in heat.outcomes.items():
            requests = zip(plain.asks or job.asks, run.asks or job.asks, strict=False)
            for number, (ask, other) in enumerate(requests):
                params = ask.params
                left, right = plain.answers[number].tokens, run.answers[number].tokens
                key = (name, ask.prompt, params.temperature, params.seed, left, right)
                determined = params.greedy or (params.seed is not None and name in sampled)
                if name == PLAIN or ask != other or not determined or key in seen:
                    continue
                seen.add(key)
                difference = None if left == right else judge(ask, left, right)
                kind = 0 if difference is None else 1 if difference.is_tie else 2
                counts.setdefault(name, Counter())[KINDS[kind]] += 1
                if difference is not None:
                    where = job.category, job.index + number, job.concurrency, job.temperature
                    partings.append(MethodDivergence(name, *where, difference))
    return Comparison({name: dict(count) for name, count in counts.items()}, partings)
