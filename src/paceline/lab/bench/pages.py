"""A benchmark's result as one report: tables for the terminal, and plots for files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from paceline.engine.driver import StepSums
from paceline.lab.bench.figures import OVERALL, Row, Spread
from paceline.lab.bench.predict import Predicted
from paceline.lab.bench.result import BenchResult, labels
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
from paceline.lab.report.document import Cell, Figure, Report, Table, Text

PHASES = tuple(StepSums().seconds)
_NOTE = (
    "Medians over rounds, ± half of the range from the lowest to the highest. TTFT: median time to "
    "first token. ITL: gap before a delivery, divided by the tokens delivered together; stall: the "
    "undivided gap. Tokens a step: mean accepted length, the target's own token included."
)
_ACCEPTANCE = (
    "Conditional: of the drafts that had a token at this position, all before it accepted, the "
    "share whose token was accepted; in brackets how many drafts that were, over all rounds."
)
_CONCURRENCY = (
    "All prompts; every client sends its next request when one is answered. Speedup is over the "
    "best plain decoding at the same concurrency."
)
_ALONE = " transformers answers one request at a time, so it runs at 1 only."
_STEPS = (
    "Mean over steps in which nobody reads a prompt. target: its forward; verify: distributions, "
    "rule, transfer; other: scheduling, batching and bookkeeping in Python."
)
_PREDICTED = (
    "Speedups over our own plain decoding. textbook: (1 - a^(g+1)) / ((1 - a)(g c + 1)); "
    "predicted: acceptance by position, and forwards of target and drafter measured alone; "
    "decoding: measured, without the steps that read prompts; measured: whole runs."
)
_TEXTS = (
    "Texts beside plain decoding's. Near tie: where they part, the two tokens' scores are within "
    "the rounding of the dtype. A different text of ours is a bug; transformers computes in "
    "another order and may differ by more."
)
_UNEQUAL = (
    "Other engines get the prompts as the target's template renders them, and are asked for as "
    "many tokens. cache: of prompts. Their speedup is over our plain decoding, and a text of "
    "theirs that parts from it is no bug of ours."
)
_INTERRUPTED = "Interrupted: these are the figures of what was complete."
_KINDS = ("identical", "near tie", "different")


def rate(value: Spread) -> str:
    """Tokens a second."""
    return value.shown(0)


def speedup(value: Spread) -> str:
    return value.shown(2, "x")


_CLIENTS = Column("", "clients", "concurrency")
_RATE = Column("", "tok/s", "tokens_per_second", rate)
_SPEEDUP = Column("", "speedup", "speedup", speedup)
_LENGTH = Column("", "drafted a step", "drafts.length", number)
_TOKENS = Column("", "tokens a step", "drafts.mean_accepted_length", number)
_LATENCIES = (
    Column("", "TTFT ms", "time_to_first_token", milliseconds),
    Column("", "ITL p50 ms", "inter_token_p50", milliseconds),
    Column("", "ITL p99 ms", "inter_token_p99", milliseconds),
)
_PHASES = (
    *(Column("", f"{name} ms", f"phases.{name}", milliseconds) for name in PHASES),
    Column("", "step ms", "step", milliseconds),
    Column("", "Python", "python", share),
)
_PREDICTION = (
    *(
        Column("", name, f"prediction.{name}", times)
        for name in ("textbook", "predicted", "decoding", "measured")
    ),
    Column("", "pred./meas.", "prediction.predicted_by_measured", number),
    Column("", "step ms predicted", "prediction.step", milliseconds),
    Column("", "step ms measured", "prediction.measured_step", milliseconds),
)


def _at_position(index: int) -> Column:
    """What was accepted there, with the number of drafts that reached it."""

    def shown(row: Row) -> str | None:
        if index >= len(row.drafts.reached):
            return None
        return f"{row.drafts.acceptance[index]:.2f} ({row.drafts.reached[index]})"

    return Column("", f"position {index + 1}", "", shown)


def _clients(items: Sequence[Any]) -> list[Column]:
    """A column for them, where there are several numbers of them."""
    return [_CLIENTS] if len({item.concurrency for item in items}) > 1 else []


class ResultPages:
    """What the reports of all benchmarks have; the sections go into ``report``."""

    def __init__(self, result: BenchResult, report: Report) -> None:
        self.result, self.report = result, report
        self.label = labels([method.name for method in result.methods])
        self.method = Column("", "method", "method", self.label.__getitem__)
        drafting = {method.name for method in result.methods if method.speculates}

        def accepted(row: Row) -> str | None:
            if row.drafts.acceptance_rate is not None:
                return share(row.drafts.acceptance_rate)
            return NONE_TRIED if row.drafts.drafted == 0 and row.method in drafting else None

        self.accepted = Column("", "accepted", "", accepted)

    def begin(self, how: str, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """Where and ``how`` it was measured, and what must not be missed."""
        result, machine = self.result, self.result.machine
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        warnings = [*(line + "." for line in result.complaints()), *warnings]
        lines = [f"{name}: {spec}." for name, spec in result.specs().items()]
        if result.left_out:
            lines.append(f"Left out, as too long for the model: {', '.join(result.left_out)}.")
        lines += notes
        if result.settings.get("lossy"):
            lines.append("Typical acceptance: sampled text is not the target's own.")
        self.report.add(
            "Run",
            Text(f"{where}, {machine['dtype']}, torch {machine['torch']}; {how}."),
            *(Text(words, warning=True) for words in warnings),
            *map(Text, lines),
        )

    def by_method(
        self,
        figures: Sequence[Any],
        points: Sequence[Any],
        at: str,
        value: str,
        shown: Callable[[Any], Any] = lambda value: value,
    ) -> dict[str, list[Any]]:
        """The attribute ``value`` of every method's figures where ``at`` is each of ``points``;
        None where there is none."""
        key, what = attrgetter("method", at), attrgetter(value)
        known = {key(one): shown(what(one)) for one in figures if what(one) is not None}
        names = dict.fromkeys(one.method for one in figures)
        return {self.label[name]: [known.get((name, x)) for x in points] for name in names}

    def texts(self, note: str) -> None:
        counts = {self.label[n]: Counter(c) for n, c in self.result.texts.counts.items()}
        if counts:
            rows: list[list[Cell]] = [[n, *(c[k] for k in _KINDS)] for n, c in counts.items()]
            self.report.add("Same text", Table(["method", *_KINDS], rows, note=note))

    def unequal(self) -> None:
        engines = [{"name": self.label[n], **c} for n, c in self.result.unequal.items()]
        columns = [Column("", aspect.replace("_", " "), aspect) for aspect in ASPECTS]
        if engines:
            table = table_of(engines, [Column("", "engine", "name"), *columns], _UNEQUAL)
            self.report.add("What could not be made equal", table)


def speedup_bars(title: str, name: str, groups: Sequence[str], series: Any) -> Figure:
    """Speedups, with a line at plain decoding's."""
    return Figure(title, lambda: plots.bars(groups, series, "speedup", baseline=1.0), name)


def report_of(result: BenchResult) -> Report:
    """The sections that the measurements give cause to."""
    pages = _Pages(result, Report(f"Benchmark of {result.model}"))
    rounds = max((row.rounds for row in result.rows), default=0)
    settings = result.settings
    pages.begin(
        f"{result.amount()} from {settings['source']}; {settings['max_tokens']} tokens each; the "
        f"methods take turns, {rounds_in_words(rounds)}",
        [_INTERRUPTED] if result.interrupted else [],
    )
    for section in (pages.overall, pages.categories):
        for temperature in pages.temperatures:
            section(temperature)
    pages.acceptance()
    for temperature in pages.temperatures:
        pages.concurrency(temperature)
    pages.temperature()
    pages.steps()
    pages.predictions()
    pages.texts(_TEXTS)
    pages.unequal()
    if result.perplexities:
        lines = [Text(perplexity.line) for perplexity in result.perplexities]
        pages.report.add("Perplexity of the target", *lines)
    return pages.report


def rounds_in_words(rounds: int) -> str:
    return f"{rounds} {'round' if rounds == 1 else 'rounds'}"


class _Pages(ResultPages):
    """One method a section; all read the same rows."""

    def __init__(self, result: BenchResult, report: Report) -> None:
        super().__init__(result, report)
        self.rows = result.rows
        self.counts = list(dict.fromkeys(row.concurrency for row in self.rows))
        self.base = min(self.counts, default=1)
        self.temperatures = list(dict.fromkeys(row.temperature for row in self.rows))

    def overall(self, temperature: float) -> None:
        price = self.result.price
        cost = "" if price is None else f" Cost: of a million tokens, at {price:g} a machine hour."
        rows = self._total(self.base, temperature)
        if rows:
            best = self.label[rows[0].best_plain]
            self.report.add(
                "Methods" + self._at(temperature),
                table_of(rows, self._speeds(_RATE), _NOTE + cost),
                Text(f"Speedup is over the best plain decoding in the same rounds: {best}."),
            )

    def categories(self, temperature: float) -> None:
        many = any(row.category == OVERALL for row in self.rows)
        every = self._rows(self.base, temperature)
        rows = [row for row in every if row.category not in (OVERALL, EVERYTHING)]
        names = list(dict.fromkeys(row.category for row in rows))
        if not rows or (len(names) == 1 and len(self.temperatures) == 1 and not many):
            return
        median = Column("", "tok/s", "tokens_per_second.median", "{:.0f}".format)
        columns = self._speeds(median)
        body: list[Sequence[Cell]] = []
        for name in names:
            category_table = table_of([row for row in rows if row.category == name], columns)
            body += [[name, *[None] * (len(columns) - 1)], *category_table.rows]
        series = self.by_method(rows, names, "category", "speedup.median")
        shown = self.by_method(rows, names, "category", "speedup.median", times)
        at = self._at(temperature)
        title = "Speedup over the best plain decoding, by category" + at
        self.report.add(
            "By category" + at,
            Table(["speedup", *shown], list(zip(names, *shown.values(), strict=True))),
            speedup_bars(title, f"speedup{self._suffix(temperature)}", names, series),
            Table([column.heading for column in columns], body),
        )

    def acceptance(self) -> None:
        first = self._total(self.base, self.temperatures[0]) if self.rows else []
        rows = {self.label[row.method]: row for row in first if row.drafts.reached}
        if not rows:
            return
        depth = range(max(len(row.drafts.reached) for row in rows.values()))
        columns = [_LENGTH, self.accepted, *map(_at_position, depth)]
        series = {name: list(row.drafts.acceptance) for name, row in rows.items()}
        self._with_lines(
            "Acceptance by position",
            table_across("", rows, columns, _ACCEPTANCE),
            "Acceptance by position in the draft, conditional",
            ([float(n + 1) for n in depth], series, "position", "accepted"),
            "acceptance",
        )

    def concurrency(self, temperature: float) -> None:
        if len(self.counts) < 2:
            return
        rows = [row for count in self.counts for row in self._total(count, temperature)]
        alone = _ALONE if any(method.alone for method in self.result.methods) else ""
        columns = (_CLIENTS, self.method, _RATE, _SPEEDUP, _LENGTH, _TOKENS, *_LATENCIES)
        series = self.by_method(rows, self.counts, "concurrency", "tokens_per_second.median")
        at = self._at(temperature)
        self._with_lines(
            "Concurrency" + at,
            table_of(rows, columns, _CONCURRENCY + alone + self._repetition(rows)),
            "Throughput against concurrency" + at,
            (list(map(float, self.counts)), series, "requests in flight", "tokens/s", True),
            f"concurrency{self._suffix(temperature)}",
        )

    def temperature(self) -> None:
        if len(self.temperatures) < 2:
            return
        rows = [row for t in self.temperatures for row in self._total(self.base, t)]
        columns = (
            Column("", "temperature", "temperature", "{:g}".format),
            *(self.method, _RATE, _SPEEDUP, self.accepted, _TOKENS),
        )
        series = self.by_method(rows, self.temperatures, "temperature", "speedup.median")
        self._with_lines(
            "Temperature",
            table_of(rows, columns, UNTRIED if NONE_TRIED in map(self.accepted.cell, rows) else ""),
            "Speedup against temperature",
            (self.temperatures, series, "temperature", "speedup"),
            "temperature",
        )

    def steps(self) -> None:
        every = [row for count in self.counts for row in self._total(count, self.temperatures[0])]
        rows = [row for row in every if row.phases]
        if rows:
            base_rows = [row for row in rows if row.concurrency == self.base]
            parts = {name: [row.phases[name] * 1e3 for row in base_rows] for name in PHASES}
            methods = [self.label[row.method] for row in base_rows]
            self.report.add(
                "Time per step",
                table_of(rows, [*_clients(rows), self.method, *_PHASES], _STEPS),
                Figure(
                    "Where a step's time goes",
                    lambda: plots.stacks(methods, parts, "ms per step"),
                    "steps",
                ),
            )

    def predictions(self) -> None:
        """Beside what was measured, and at the base from one to the other, reason by reason."""
        items = self.result.predictions
        if not items:
            return
        table = table_of(items, [*_clients(items), self.method, *_PREDICTION], _PREDICTED)
        base = [item for item in items if item.concurrency == self.base]
        reasons = dict.fromkeys(reason.name for item in base for reason in item.prediction.items)

        def moved(name: str) -> Callable[[Predicted], str | None]:
            def shown(item: Predicted) -> str | None:
                speedups = {reason.name: reason.speedup for reason in item.prediction.items}
                return f"{speedups[name]:+.2f}" if name in speedups else None

            return shown

        rows = [
            Column("", "predicted", "prediction.predicted", times),
            *(Column("", name, "", moved(name)) for name in reasons),
            Column("", "measured", "prediction.measured", times),
        ]
        seen = {self.label[item.method]: item for item in base}
        why = [table_across("from predicted to measured speedup", seen, rows)] if base else []
        self.report.add("Predicted against measured speedup", table, *why)

    def _with_lines(self, title: str, table: Table, caption: str, drawn: Any, name: str) -> None:
        """A table, and a picture of lines: ``drawn`` are the arguments of ``plots.lines``."""
        self.report.add(title, table, Figure(caption, lambda: plots.lines(*drawn), name))

    def _rows(self, concurrency: int, temperature: float) -> list[Row]:
        cell = concurrency, temperature
        return [row for row in self.rows if (row.concurrency, row.temperature) == cell]

    def _total(self, concurrency: int, temperature: float) -> list[Row]:
        """Rows over all categories."""
        rows = self._rows(concurrency, temperature)
        total = [row for row in rows if row.category in (OVERALL, EVERYTHING)]
        return total or rows  # one category is all there is

    def _at(self, temperature: float) -> str:
        needed = temperature or len(self.temperatures) > 1
        return f" at temperature {temperature:g}" if needed else ""

    def _suffix(self, temperature: float) -> str:
        return f"-t{temperature:g}" if len(self.temperatures) > 1 else ""

    def _speeds(self, rate: Column) -> list[Column]:
        stall = Column("", "stall p99 ms", "stall_p99", milliseconds)
        columns = [self.method, rate, _SPEEDUP, *_LATENCIES, stall, _TOKENS]
        price = self.result.price
        if price is not None:
            cost = Column("", "cost", "", lambda row: f"{row.cost_per_million(price):.3g}")
            columns.append(cost)
        return columns

    def _repetition(self, rows: Iterable[Row]) -> str:
        """A drafter that remembers has an easy time with prompts that come again."""
        prompts = self.result.settings["prompts"] - len(self.result.left_out)
        remembering = [self.label[m.name] for m in self.result.methods if m.remembers]
        if not remembering or all(row.requests <= prompts * row.rounds for row in rows):
            return ""
        names = ", ".join(remembering)
        return f" Prompts are repeated to occupy all clients, which flatters {names}."
