"""A benchmark's result as one report: tables for the terminal, and plots for files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from paceline.engine.driver import StepSums
from paceline.lab.bench.figures import OVERALL, Row, Spread
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.result import KINDS, BenchResult, labels
from paceline.lab.bench.runner import EVERYTHING
from paceline.lab.bench.served import ASPECTS
from paceline.lab.report import plots
from paceline.lab.report.columns import (
    NONE_TRIED,
    UNTRIED,
    Column,
    milliseconds,
    number,
    share,
    table_across,
    table_of,
    times,
)
from paceline.lab.report.document import Figure, Report, Table, Text

_NOTE = (
    "Medians over rounds, ± half of the range from the lowest to the highest. Speedup is over our "
    "plain decoding in the same rounds; 95 %: how far other such prompts may move it "
    "(bootstrap over prompts). Tokens a step: the target's own token included."
)
_LATENCY = (
    "TTFT: median time to first token. ITL: gap before a delivery, divided by the tokens delivered "
    "together; stall: the undivided gap."
)
_CLIENTS = (
    " Of several clients each sends its next request when one is answered; prompts are repeated to "
    "occupy all of them, which flatters drafters that remember."
)
_SUITE = (
    "Speedup: mean over the questions of tokens a second, by that of our own plain decoding; "
    "prompts included. #Mean accepted tokens: tokens a target step, the bonus token counted (plain "
    "decoding has 1.00), without the steps that read a prompt."
)
_ACCEPTANCE = (
    "Conditional: of the drafts that had a token at this position, all before it accepted, the "
    "share whose token was accepted; in brackets how many drafts that were, over all rounds."
)
_STEPS = (
    "Mean over steps in which nobody reads a prompt. target: its forward; verify: distributions, "
    "rule, transfer; other: scheduling, batching and bookkeeping in Python."
)
_TEXTS = (
    "Texts beside plain decoding's, of requests that were asked alike. Near tie: where they part, "
    "the two tokens' scores are within the rounding of the dtype. A different text of ours is a "
    "bug; other engines compute in another order and may differ by more."
)
_UNEQUAL = (
    "Other engines get the prompts as the target's template renders them, and are asked for as "
    "many tokens; precision, threads and their cache of prompts are their own. Their speedup is "
    "over our plain decoding, and a text of theirs that parts from it is no bug of ours."
)


def rate(value: Spread) -> str:
    """Tokens a second."""
    return value.shown(0)


def speedup(value: Spread) -> str:
    return value.shown(2, "x")


_RATE = Column("", "tok/s", "tokens_per_second", rate)
_SPEEDUP = Column("", "speedup", "speedup.median", times)
_LENGTH = Column("", "tokens a step", "drafts.mean_accepted_length", number)
_SPEEDS = (
    _RATE,
    Column("", "speedup", "speedup", speedup),
    Column("", "95 %", "interval", lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}x"),
    _LENGTH,
)
_LATENCIES = (
    Column("", "TTFT ms", "time_to_first_token", milliseconds),
    Column("", "ITL p50 ms", "inter_token_p50", milliseconds),
    Column("", "ITL p99 ms", "inter_token_p99", milliseconds),
    Column("", "stall p99 ms", "stall_p99", milliseconds),
)
_PHASES = (
    *(Column("", f"{name} ms", f"phases.{name}", milliseconds) for name in StepSums().seconds),
    Column("", "step ms", "step", milliseconds),
    Column("", "Python", "python", share),
)
_SWEPT = (
    Column("", "clients", "concurrency"),
    Column("", "temperature", "temperature", "{:g}".format),
)


def _at_position(index: int) -> Column:
    """What was accepted there, with the number of drafts that reached it."""

    def shown(row: Row) -> str | None:
        known = list(zip(row.drafts.acceptance, row.drafts.reached, strict=True))[index:]
        return "{:.2f} ({})".format(*known[0]) if known else None

    return Column("", f"position {index + 1}", "", shown)


def report_of(result: BenchResult) -> Report:
    """The sections that the measurements give cause to."""
    pages = _Pages(result)
    pages.run()
    if result.rows:
        pages.speeds()
        pages.acceptance()
        pages.steps()
    pages.texts()
    if result.perplexities:
        lines = [Text(perplexity.line) for perplexity in result.perplexities]
        pages.report.add("Perplexity of the target", *lines)
    if result.spending is not None:
        pages.report.add("Time", Text(result.spending.line))
    return pages.report


class _Pages:
    """One method a section; all read the same rows."""

    def __init__(self, result: BenchResult) -> None:
        title = "Benchmark" if result.suite is None else result.suite.title
        self.report = Report(f"{title} of {result.model}")
        self.result, self.rows = result, result.rows
        self.label = labels([method.name for method in result.methods])
        self.method = Column("", "method", "method", self.label.__getitem__)
        self.base = min((row.concurrency for row in self.rows), default=1)
        self.temperatures = list(dict.fromkeys(row.temperature for row in self.rows))
        alone = len({row.category for row in self.rows if row.concurrency == self.base}) == 1
        self.totals = [r for r in self.rows if alone or r.category in (OVERALL, EVERYTHING)]

    def at(self, rows: Sequence[Row], temperature: float) -> list[Row]:
        """At the fewest clients."""
        return [r for r in rows if (r.concurrency, r.temperature) == (self.base, temperature)]

    def swept(self, items: Sequence[Any]) -> list[Column]:
        """Columns of what there are several of, and the method."""
        seen = [{getattr(item, str(c.path), None) for item in items} for c in _SWEPT]
        several = [c for c, values in zip(_SWEPT, seen, strict=True) if len(values) > 1]
        return [*several, self.method]

    def by_method(
        self, rows: Sequence[Row], points: Sequence[Any], at: str, value: Callable[[Row], Any]
    ) -> dict[str, list[Any]]:
        """The ``value`` of every method's rows where ``at`` is each of ``points``; None where there
        is none."""
        key = attrgetter("method", at)
        known = {key(row): value(row) for row in rows}
        names = dict.fromkeys(row.method for row in rows)
        return {self.label[name]: [known.get((name, x)) for x in points] for name in names}

    def run(self) -> None:
        """Where and how it was measured, and what must not be missed."""
        result, machine, settings = self.result, self.result.machine, self.result.settings
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        rounds = max((row.rounds for row in result.rows), default=0)
        how = (
            f"{result.amount()} from {settings['source']}; at most {settings['max_tokens']} tokens "
            f"an answer; the methods take turns, {rounds} {'round' if rounds == 1 else 'rounds'}"
        )
        if result.suite is not None:
            how += "; turn by turn, batch 1; the bonus token is counted"
        warnings = [line + "." for line in result.complaints()]
        if result.interrupted:
            warnings.append("Interrupted: these are the figures of what was complete.")
        lines = [f"{name}: {spec}." for name, spec in result.specs().items()]
        if result.left_out:
            lines.append(f"Left out, as too long for the model: {', '.join(result.left_out)}.")
        if result.cut:
            lines.append(f"{result.cut} conversations ended early: the context had no more room.")
        if settings.get("lossy"):
            lines.append("Typical acceptance: sampled text is not the target's own.")
        self.report.add(
            "Run",
            Text(f"{where}, {machine['dtype']}, torch {machine['torch']}; {how}."),
            *(Text(words, warning=True) for words in warnings),
            *map(Text, lines),
        )

    def speeds(self) -> None:
        """All methods at every number of clients and temperature, then by category; of a suite
        the tables that it publishes."""
        if self.result.suite is None:
            self.methods()
        for temperature in self.temperatures:
            rows = self.at(self.rows, temperature)
            names = list(dict.fromkeys(row.category for row in rows))
            if self.result.suite is not None:
                self.published(self.result.suite.title, rows, names, temperature)
            elif len(names := [n for n in names if n not in (OVERALL, EVERYTHING)]) > 1:
                title = "By category"
                if temperature or len(self.temperatures) > 1:
                    title += f" at temperature {temperature:g}"
                self.report.add(
                    title,
                    self.pivot(rows, names, _SPEEDUP, "Speedup."),
                    self.pivot(rows, names, _LENGTH, "Tokens a target step."),
                    self.bars(rows, names, _SPEEDUP, temperature),
                )

    def methods(self) -> None:
        price, note, figures = self.result.price, _NOTE, list[Figure]()
        swept = self.swept(self.totals)
        columns = [*swept, *_SPEEDS, Column("", "accepted", "", self.accepted)]
        if price is not None:
            note += f" Cost: of a million tokens, at {price:g} a machine hour."
            columns.append(Column("", "cost", "", lambda r: f"{r.cost_per_million(price):.3g}"))
        clients = sorted({float(row.concurrency) for row in self.totals})
        if len(clients) > 1:
            note += _CLIENTS
            rows = [row for row in self.totals if row.temperature == self.temperatures[0]]
            value = attrgetter("tokens_per_second.median")
            series = self.by_method(rows, clients, "concurrency", value)
            axes = clients, series, "requests in flight", "tokens/s", True
            title = "tokens/s against concurrency"
            figures.append(Figure(title, lambda: plots.lines(*axes), "concurrency"))
        if NONE_TRIED in map(self.accepted, self.totals):
            note += f" {UNTRIED}"
        latencies = table_of(self.totals, [*swept, *_LATENCIES], _LATENCY)
        self.report.add("Methods", table_of(self.totals, columns, note), latencies, *figures)

    def accepted(self, row: Row) -> str | None:
        drafting = {method.name for method in self.result.methods if method.draft}
        if row.drafts.acceptance_rate is not None:
            return share(row.drafts.acceptance_rate)
        return NONE_TRIED if row.drafts.drafted == 0 and row.method in drafting else None

    def pivot(
        self, rows: Sequence[Row], categories: Sequence[str], value: Column, note: str
    ) -> Table:
        """A row for each method, a column for each category."""
        cells = self.by_method(rows, categories, "category", value.cell)
        return Table(["method", *categories], [[n, *row] for n, row in cells.items()], note=note)

    def bars(
        self, rows: Sequence[Row], categories: Sequence[str], value: Column, temperature: float
    ) -> Figure:
        """Speedups, with a line at plain decoding's."""
        series = self.by_method(rows, categories, "category", value.value)
        series.pop(self.label[PLAIN], None)
        name = f"speedup-t{temperature:g}" if len(self.temperatures) > 1 else "speedup"
        return Figure(
            f"Speedup over plain decoding, by category, temperature {temperature:g}",
            lambda: plots.bars(categories, series, "speedup", baseline=1.0),
            name,
        )

    def published(
        self, title: str, rows: Sequence[Row], tasks: Sequence[str], temperature: float
    ) -> None:
        """The tables that the benchmark publishes, tasks across (Spec-Bench's leaderboard)."""
        questions = {row.category: row.heats for row in rows}
        shown = "; ".join(f"{name} {count}" for name, count in questions.items())
        tokens = Column("", "", "drafts.mean_accepted_tokens", number)
        mean = Column("", "", "mean_speedup", times)
        single = [task for task in tasks if task != OVERALL]
        self.report.add(
            f"{title} at temperature {temperature:g}",
            self.pivot(rows, tasks, mean, _SUITE),
            self.bars(rows, single, mean, temperature),
            self.pivot(rows, tasks, tokens, "#Mean accepted tokens."),
            self.pivot(rows, tasks, _RATE, f"Tokens/s. Questions: {shown}"),
        )

    def acceptance(self) -> None:
        rows = {
            self.label[row.method]: row
            for row in self.at(self.totals, self.temperatures[0])
            if row.drafts.reached
        }
        if not rows:
            return
        depth = range(max(len(row.drafts.reached) for row in rows.values()))
        accepted = Column("", "accepted", "", self.accepted)
        length = Column("", "drafted a step", "drafts.length", number)
        series = {name: list(row.drafts.acceptance) for name, row in rows.items()}
        axes = [float(n + 1) for n in depth], series, "position", "accepted"
        title = "Acceptance by position in the draft, conditional"
        self.report.add(
            "Acceptance by position",
            table_across("", rows, [length, accepted, *map(_at_position, depth)], _ACCEPTANCE),
            Figure(title, lambda: plots.lines(*axes), "acceptance"),
        )

    def steps(self) -> None:
        first = self.temperatures[0]
        rows = [row for row in self.totals if row.temperature == first and row.phases]
        if rows:
            table = table_of(rows, [*self.swept(rows), *_PHASES], _STEPS)
            self.report.add("Time per step", table)

    def texts(self) -> None:
        result, counts = self.result, self.result.texts.counts
        if counts:
            columns = [self.method, *(Column("", kind, kind) for kind in KINDS)]
            none = dict.fromkeys(KINDS, 0)
            named = [{"method": name, **none, **count} for name, count in counts.items()]
            self.report.add("Same text", table_of(named, columns, _TEXTS))
        if result.unequal:
            columns = [Column("", aspect.replace("_", " "), aspect) for aspect in ASPECTS]
            engines = [{"method": name, **words} for name, words in result.unequal.items()]
            table = table_of(engines, [self.method, *columns], _UNEQUAL)
            self.report.add("What could not be made equal", table)
