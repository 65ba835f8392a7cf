"""The figures of the decoding benchmark, complete or interrupted: JSON and tables."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from measuring import mean, rounded
from paceline import LLM
from paceline.lab.bench.runner import HeatRecord
from paceline.lab.bench.runs import TimedRun
from paceline.lab.difference import explain
from paceline.lab.report.document import Table
from paceline.lab.report.render import rich_table

PLAIN, FIXED, ADAPTIVE = "paceline plain", "paceline fixed 4", "paceline adaptive"
THEIRS, ASSISTED, LOOKUP = "transformers", "transformers assisted", "transformers lookup"
BATCH = "batch 8"
SAMPLED = "sampled "  # prefix of the suites decoded at temperature 1


@dataclass
class Record:
    """Outcomes by (suite, engine) and prompt; several rounds each."""

    outcomes: dict[tuple[str, str], dict[int, list[TimedRun]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    @classmethod
    def of(cls, heats: HeatRecord) -> Record:
        record = cls()
        for heat in heats.heats:
            for name, outcome in heat.outcomes.items():
                record.add(heat.job.category, name, heat.job.index, outcome)
        return record

    def add(self, suite: str, engine: str, prompt: int, outcome: TimedRun) -> None:
        self.outcomes[suite, engine][prompt].append(outcome)

    def suites(self) -> list[str]:
        """In the order of measurement."""
        return list(dict.fromkeys(suite for suite, _ in self.outcomes))

    def engines(self, suite: str) -> list[str]:
        return [name for s, name in self.outcomes if s == suite]

    def _medians(self, suite: str, engine: str) -> dict[int, tuple[float, int]]:
        """Median wall seconds over the rounds, and tokens, by prompt."""
        runs = self.outcomes.get((suite, engine), {})
        return {
            prompt: (statistics.median(run.seconds for run in many), many[0].tokens)
            for prompt, many in runs.items()
        }

    def speed(self, suite: str, engine: str) -> float | None:
        """Tokens per second over the suite: all tokens by the sum of median seconds."""
        found = self._medians(suite, engine).values()
        return sum(n for _, n in found) / sum(s for s, _ in found) if found else None

    def ratio(self, suite: str, fast: str, slow: str) -> float | None:
        """How many times faster ``fast`` is in tokens a second, over the prompts that both have
        decoded: answers that end by themselves may differ in length."""
        a, b = self._medians(suite, fast), self._medians(suite, slow)
        common = a.keys() & b.keys()
        if not common:
            return None
        rates = [sum(own[p][1] for p in common) / sum(own[p][0] for p in common) for own in (a, b)]
        return rates[0] / rates[1]

    def runs(self, suite: str, engine: str) -> list[TimedRun]:
        return [run for many in self.outcomes.get((suite, engine), {}).values() for run in many]

    def drafts(self, suite: str, engine: str) -> dict[str, float] | None:
        """Acceptance rate and tokens per target step; None where nothing was drafted."""
        runs = self.runs(suite, engine)
        drafted = sum(run.drafted or 0 for run in runs)
        steps = max(1, sum(run.steps for run in runs))
        if not drafted:
            return None
        return {
            "acceptance": sum(run.accepted for run in runs) / drafted,
            "mean_accepted_length": sum(run.tokens for run in runs) / steps,
        }


def agreement(
    llm: LLM, heats: HeatRecord, suites: list[str], left: str, right: str
) -> dict[str, dict[str, int]]:
    """By suite, how many prompts two engines decode identically. A near tie: where the texts part
    the two tokens' scores are within the rounding of the dtype."""
    counts: dict[str, Counter[str]] = {suite: Counter() for suite in suites}
    for heat in heats.heats:
        if heat.turn or heat.job.category not in counts:
            continue
        (ask,) = heat.job.asks
        a, b = (heat.outcomes[name].answers[0].tokens for name in (left, right))
        found = None if a == b else explain(llm.target, ask.prompt, a, b, ask.params)
        kind = "identical" if found is None else "near tie" if found.is_tie else "different"
        counts[heat.job.category][kind] += 1
    return {suite: dict(own) for suite, own in counts.items()}


def step_of(record: Record, suites: list[str]) -> dict[str, Any]:
    """A speculative step that reads no prompt: its milliseconds, each phase's share of it, and what
    is outside of drafting and the target's forward."""
    runs = [run for suite in suites for run in record.runs(suite, FIXED) if run.decoding_steps]
    steps = sum(run.decoding_steps for run in runs)
    phases = Counter[str]()
    for run in runs:
        phases.update(run.phases)
    total = sum(phases.values())
    if not total:
        return {"overhead_fraction": None}
    return {
        "overhead_fraction": round(1 - (phases["draft"] + phases["target"]) / total, 4),
        "step_shares": {name: round(seconds / total, 4) for name, seconds in phases.items()},
        "step_milliseconds": round(1e3 * total / steps, 3),
    }


def figures(record: Record) -> dict[str, Any]:
    """The JSON object of one pair; a figure that was not measured is null."""
    every = record.suites()
    suites = [s for s in every if s != BATCH and not s.startswith(SAMPLED)]

    def by_suite(fast: str, slow: str) -> dict[str, float | None]:
        return {s: rounded(record.ratio(s, fast, slow)) for s in suites}

    drafts: dict[str, Any] = {}
    for suite in every:
        for name in record.engines(suite):
            if found := record.drafts(suite, name):
                entry = {key: rounded(value) for key, value in found.items()}
                drafts.setdefault(suite, {})[name] = entry
    result: dict[str, Any] = {
        "plain_vs_transformers": rounded(mean([record.ratio(s, PLAIN, THEIRS) for s in suites])),
        "speculative_vs_plain": by_suite(FIXED, PLAIN),
        "adaptive_vs_plain": by_suite(ADAPTIVE, PLAIN),
        "speculative_vs_assisted": by_suite(FIXED, ASSISTED),
        "batch8_adaptive_vs_plain": rounded(record.ratio(BATCH, ADAPTIVE, PLAIN)),
        "tokens_per_second": {
            s: {n: rounded(record.speed(s, n), 1) for n in record.engines(s)} for s in every
        },
        "drafts": drafts,
    } | step_of(record, suites)
    rules: dict[str, list[float | None]] = {}
    for suite in every:
        for name in record.engines(suite) if suite.startswith(SAMPLED) else ():
            rules.setdefault(name, []).append(record.speed(suite, name))
    if rules:
        result["sampled_tokens_per_second"] = {n: rounded(mean(v), 1) for n, v in rules.items()}
    return result


def _table(record: Record, suites: list[str], title: str) -> Table:
    """Tokens per second by suite and engine, drafts' figures in brackets."""

    def cell(suite: str, name: str) -> str | None:
        speed, drafts = record.speed(suite, name), record.drafts(suite, name)
        if speed is None or drafts is None:
            return None if speed is None else f"{speed:.1f}"
        return f"{speed:.1f} ({drafts['acceptance']:.2f}, {drafts['mean_accepted_length']:.2f})"

    names = dict.fromkeys(name for suite in suites for name in record.engines(suite))
    rows = [
        [suite.removeprefix(SAMPLED), *(cell(suite, name) for name in names)] for suite in suites
    ]
    note = "In brackets: acceptance rate, tokens per target step."
    return Table(["tokens/s", *names], rows, title, note)


def show(pair: str, record: Record, result: dict[str, Any], console: Console) -> None:
    """Print one pair's tables, then its ratios."""
    sampled = [s for s in record.suites() if s.startswith(SAMPLED)]
    greedy = [s for s in record.suites() if s != BATCH and s not in sampled]
    for suites, title in (
        (greedy, "greedy, batch 1, prefill included"),
        (sampled, "temperature 1, batch 1"),
        ([BATCH] if BATCH in record.suites() else [], "greedy, eight prompts together"),
    ):
        if suites:
            console.print(rich_table(_table(record, suites, f"{pair}: {title}")))
    for key, value in result.items():
        if key not in ("tokens_per_second", "drafts"):
            console.print(f"  {key}: {value}", highlight=False, soft_wrap=True)
