"""All that a benchmark found, and the JSON object of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from paceline.lab.bench.figures import OVERALL, Row, idle, rows
from paceline.lab.bench.methods import PLAIN, Length, Method
from paceline.lab.bench.predict import Prediction
from paceline.lab.bench.runner import CategoryPrompts, Sweep
from paceline.lab.bench.runs import Heat, HeatRecord
from paceline.lab.bench.suites import Suite
from paceline.lab.bench.texts import Comparison, compare, judge_of
from paceline.lab.budget import Budget
from paceline.lab.perplexity import TextPerplexity
from paceline.lab.report.columns import Column, record_of, times
from paceline.llm import LLM
from paceline.settings.tuned import MachineIdentity

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


def _interval_shown(item: Sureness) -> str | None:
    return None if item.low is None else f"{item.low:.2f} to {item.high:.2f}x"


SURENESS = (
    Column("method", "method"),
    Column("concurrency", "at once"),
    Column("temperature", "temperature", shown="{:g}".format),
    Column("speedup", "speedup", shown=times),
    Column("", "95 %", "", _interval_shown),
    *(Column("low"), Column("high")),
    Column("prompts", "prompts"),
    Column("rounds", "rounds"),
)


@dataclass(frozen=True)
class BenchSpending:
    """``seconds``: the budget of this run, None without; ``spent`` in all runs that went into the
    figures. Heats are those measured of those wanted: one prompt, or one crowd, by all methods."""

    seconds: float | None
    spent: float
    heats: int
    heats_wanted: int
    not_measured: tuple[str, ...]
    sureness: tuple[Sureness, ...]

    @classmethod
    def of(
        cls,
        record: HeatRecord,
        figures: Sequence[Row],
        sweep: Sweep,
        prompts: CategoryPrompts,
        budget: Budget,
    ) -> BenchSpending:
        round_heats, done = sweep.wanted(prompts), len(record.heats)
        wanted, first = record.rounds * round_heats, sum(heat.turn == 0 for heat in record.heats)
        missing = [
            f"{n} at once, temperature {t:g}"
            for n in sweep.concurrencies
            for t in sweep.temperatures
            if not record.of(n, t)
        ]
        if first < round_heats:
            missing.append(f"{round_heats - first} of {round_heats} turns of the first round")
        elif done < wanted:
            missing.append(f"{wanted - done} of {wanted} turns of all rounds")
        sureness = sureness_of(record, figures)
        return cls(budget.seconds, record.spent, done, wanted, tuple(missing), sureness)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "sureness": [record_of(one, SURENESS) for one in self.sureness]}

    @property
    def line(self) -> str:
        line = f"{self.spent:.0f} s: {self.heats} of {self.heats_wanted} turns of all methods."
        if self.not_measured:
            line += f" Not measured: {', '.join(self.not_measured)}. --continue goes on."
        return line


def sureness_of(record: HeatRecord, rows: Sequence[Row]) -> tuple[Sureness, ...]:
    """Of every method's overall speedup; ``rows`` are the figures of the record."""
    method_rows = []
    categories = {(row.concurrency, row.temperature, row.category) for row in rows}
    for row in rows:
        cell = row.concurrency, row.temperature
        alone = sum(key[:2] == cell for key in categories) == 1
        if row.method == row.best_plain or not (alone or row.category == OVERALL):
            continue
        heats = record.of(*cell)
        prompts = {heat.job.index for heat in heats}
        low, high = _interval(heats, row) if row.concurrency == 1 else (None, None)
        count = len(prompts) if row.concurrency == 1 else row.requests // row.rounds
        method_rows.append(
            Sureness(row.method, *cell, row.speedup.median, low, high, count, row.rounds)
        )
    return tuple(method_rows)


def _interval(heats: Sequence[Heat], row: Row) -> tuple[float | None, float | None]:
    """Of the ratio of all tokens by all seconds, prompts drawn anew with replacement."""
    sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for heat in heats:
        measured, plain = heat.outcomes[row.method], heat.outcomes[row.best_plain]
        figures = np.array([measured.tokens, measured.seconds, plain.tokens, plain.seconds])
        sums[heat.job.index] = sums.get(heat.job.index, np.zeros(4)) + figures
    if len(sums) < _FEWEST:
        return None, None
    table = np.stack(list(sums.values()))
    drawn = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    tokens, seconds, plain_tokens, plain_seconds = table[drawn].sum(1).T
    ratios = tokens / seconds * plain_seconds / plain_tokens
    low, high = np.quantile(ratios, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class BenchResult:
    """``idle`` says of speculative methods that did nothing what they lacked; ``unequal`` what
    could not be made equal, of other engines; ``left_out`` names prompts too long for the model."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    methods: Sequence[Method]
    rows: Sequence[Row]
    texts: Comparison
    idle: dict[str, str]
    suite: Suite | None = None
    cut: int = 0  # conversations whose later turns found no room in the context
    predictions: Sequence[Prediction] = ()
    left_out: Sequence[str] = ()
    price: float | None = None
    interrupted: bool = False
    spending: BenchSpending | None = None
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
        ours = [m.name for m in methods if m.variant is None and not settings["lossy"]]
        plains = {m.name for m in methods if not m.speculates and m.url is None}
        return cls(
            model=settings["model"],
            machine=machine_of(llm),
            settings=settings,
            methods=methods,
            # The public tables are by our own plain decoding.
            rows=rows(record, plains if suite is None else {PLAIN}),
            texts=compare(record, judge_of(llm), ours),
            idle=idle(record, {method.name for method in methods if method.speculates}),
            suite=suite,
            cut=sum(run.cut for heat in record.heats for run in heat.outcomes.values()),
            **more,
        )

    def record(self) -> dict[str, Any]:
        """Everything, for machines: medians and spreads, unrounded, in seconds."""
        return {
            "model": self.model,
            "suite": self.suite and self.suite.name,
            "interrupted": self.interrupted,
            "machine": self.machine,
            "settings": self.settings,
            "methods": [asdict(method) for method in self.methods],
            "figures": [row.record(self.price) for row in self.rows],
            "predicted": [prediction.record() for prediction in self.predictions],
            "texts": {
                "counts": self.texts.counts,
                "partings": [parting.record() for parting in self.texts.partings],
            },
            "idle": self.idle,
            "unequal": {name: dict(words) for name, words in self.unequal.items()},
            "perplexity": [perplexity.record() for perplexity in self.perplexities],
            "bugs": self.bugs(),
            "prompts_left_out": list(self.left_out),
            "conversations_cut": self.cut,
            "budget": self.spending and self.spending.record(),
        }

    def specs(self) -> dict[str, str]:
        """What drafts, of methods whose names do not tell."""
        draft_of = {method.name.partition("@")[0]: method.draft for method in self.methods}
        return {name: spec for name, spec in draft_of.items() if spec is not None and spec != name}

    def amount(self) -> str:
        """How many prompts the figures are of, and of how many that were asked for."""
        wanted = measured = int(self.settings["prompts"])
        if self.spending is not None:
            measured = max((item.prompts for item in self.spending.sureness), default=0)
        return f"{wanted} prompts" if measured >= wanted else f"{measured} of {wanted} prompts"

    def bugs(self) -> list[str]:
        """Methods of ours whose text is not plain decoding's, beyond what rounding explains."""
        return [
            method.name
            for method in self.methods
            if method.variant is None and self.texts.different(method.name)
        ]

    def complaints(self, allow_idle: bool = False) -> list[str]:
        """One line for each thing that makes the run a failure."""
        lines = [self._bug(name) for name in self.bugs()]
        if not allow_idle:
            lengths = {method.name: method.length for method in self.methods}
            lines += [idle_line(name, lack, lengths[name]) for name, lack in self.idle.items()]
        return lines

    def _bug(self, name: str) -> str:
        first = self.texts.different(name)[0]
        it = first.difference
        return (
            f"{name} wrote another text than {PLAIN} decoding ({first.category}, request "
            f"{first.prompt}, token {it.at}: {it.left} became {it.right}, their scores "
            f"{it.gap:.3g} apart, a rounding step is {it.step:.3g}); this is a bug, please "
            "report it"
        )


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
