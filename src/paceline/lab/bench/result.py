"""All that a benchmark found, and the JSON object of it."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from paceline.lab.bench.engines import PLAIN
from paceline.lab.bench.figures import Row, idle, rows
from paceline.lab.bench.prompts import Suite
from paceline.lab.bench.runner import Ask, CategoryPrompts, HeatRecord, Length, Method, Sweep
from paceline.lab.budget import Budget, Spending
from paceline.lab.certify.decoding import Difference, explain
from paceline.lab.perplexity import TextPerplexity
from paceline.llm import LLM
from paceline.settings.tuned import MachineIdentity

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

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "is_tie": self.difference.is_tie}


@dataclass(frozen=True)
class Comparison:
    """Over all requests whose text is determined: greedy ones, and those with a seed.
    ``counts[method]``: how many texts were identical, near ties or different."""

    counts: dict[str, dict[str, int]]
    partings: list[MethodDivergence]

    def different(self, method: str) -> list[MethodDivergence]:
        return [p for p in self.partings if p.method == method and not p.difference.is_tie]


Judge = Callable[[Ask, tuple[int, ...], tuple[int, ...]], Difference | None]


def compare(record: HeatRecord, judge: Judge, sampled: Collection[str] = ()) -> Comparison:
    """Every distinct pair of texts once, of requests that both were asked alike: greedy ones, and
    with a seed those of the ``sampled`` methods, which draw as plain decoding does."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    partings: list[MethodDivergence] = []
    seen: set[tuple[object, ...]] = set()
    for heat in record.heats:
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
                counts[name][KINDS[kind]] += 1
                if difference is not None:
                    where = job.category, job.index + number, job.concurrency, job.temperature
                    partings.append(MethodDivergence(name, *where, difference))
    return Comparison({name: dict(count) for name, count in counts.items()}, partings)


def spending_of(
    record: HeatRecord, sweep: Sweep, prompts: CategoryPrompts, budget: Budget
) -> Spending:
    """In turns: one prompt, or one crowd, by all methods."""
    cells, kind = product(sweep.concurrency, sweep.temperature), "turns of all methods"
    missing = [f"{n} at once, temperature {t:g}" for n, t in cells if not record.of(n, t)]
    wanted = {kind: record.rounds * sweep.wanted(prompts)}
    done = {kind: len(record.heats)}
    return Spending(budget.seconds, record.spent, done, wanted, tuple(missing))


@dataclass(frozen=True)
class BenchResult:
    """``idle``: what methods lacked that speculated in vain. ``unequal``: what could not be made
    equal, of other engines. ``left_out``: prompts too long for the model. ``cut``: conversations
    whose later turns found no room in the context."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    methods: Sequence[Method]
    rows: Sequence[Row]
    texts: Comparison
    idle: dict[str, str]
    suite: Suite | None = None
    cut: int = 0
    left_out: Sequence[str] = ()
    price: float | None = None
    interrupted: bool = False
    spending: Spending | None = None
    unequal: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    perplexities: Sequence[TextPerplexity] = ()

    @classmethod
    def of(
        cls,
        methods: Sequence[Method],
        settings: dict[str, Any],
        llm: LLM,
        record: HeatRecord,
        suite: Suite | None,
        **more: Any,
    ) -> BenchResult:
        """From what was measured; ``more`` are other fields."""

        def judge(ask: Ask, left: tuple[int, ...], right: tuple[int, ...]) -> Difference | None:
            return explain(llm.target, ask.prompt, left, right, ask.params)

        ours = [m.name for m in methods if m.url is None and not settings["lossy"]]
        return cls(
            model=settings["model"],
            machine=machine_of(llm),
            settings=settings,
            methods=methods,
            rows=rows(record),
            texts=compare(record, judge, ours),
            idle=idle(record, [method.name for method in methods if method.draft]),
            suite=suite,
            cut=sum(run.cut for heat in record.heats for run in heat.outcomes.values()),
            **more,
        )

    def record(self) -> dict[str, Any]:
        """Everything, for machines: medians and spreads, unrounded, in seconds."""
        texts, names = self.texts, ("model", "interrupted", "machine", "settings", "idle")
        return {
            **{name: getattr(self, name) for name in names},
            "suite": self.suite and self.suite.name,
            "methods": [asdict(method) for method in self.methods],
            "figures": [row.record(self.price) for row in self.rows],
            "texts": {"counts": texts.counts, "partings": [p.record() for p in texts.partings]},
            "unequal": {name: dict(words) for name, words in self.unequal.items()},
            "perplexity": [perplexity.record() for perplexity in self.perplexities],
            "bugs": self.bugs(),
            "prompts_left_out": list(self.left_out),
            "conversations_cut": self.cut,
            "budget": self.spending and asdict(self.spending),
        }

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


def labels(names: Sequence[str]) -> dict[str, str]:
    """Names for tables: folders lose their parents unless two would then be called the same."""
    short = {name: re.sub(r"[^:+,@=]*/(?=[^/])", "", name) for name in names}
    used = list(short.values())
    return {name: text if used.count(text) == 1 else name for name, text in short.items()}


def machine_of(llm: LLM) -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before."""
    about = asdict(MachineIdentity.of(llm.target))
    about["cores"] = os.cpu_count()
    if hasattr(os, "getloadavg"):
        about["load_before"] = os.getloadavg()[0]
    return about
