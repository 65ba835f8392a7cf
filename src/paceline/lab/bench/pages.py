"""A benchmark's result as one report: tables for the terminal, and plots for files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from paceline.engine.driver import StepSums
from paceline.lab.bench import cells
from paceline.lab.bench.figures import OVERALL, Row
from paceline.lab.bench.predict import Predicted
from paceline.lab.bench.result import BenchResult, labels
from paceline.lab.bench.runner import EVERYTHING
from paceline.lab.bench.served import ASPECTS
from paceline.lab.report import plots
from paceline.lab.report.columns import NONE_TRIED, UNTRIED, Column, table_across, table_of
from paceline.lab.report.document import Cell, Figure, Report, Table, Text

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
_KINDS = ("identical", "near tie", "different")
PHASES = tuple(StepSums().seconds)

_CLIENTS = Column("", "clients", "concurrency")
_RATE = Column("", "tok/s", "tokens_per_second", cells.rate)
_MEDIAN_RATE = Column("", "tok/s", "tokens_per_second.median", "{:.0f}".format)
_SPEEDUP = Column("", "speedup", "speedup", cells.speedup)
_LENGTH = Column("", "drafted a step", "drafts.length", cells.number)
_TOKENS = Column("", "tokens a step", "drafts.mean_accepted_length", cells.number)
_LATENCIES = (
    Column("", "TTFT ms", "time_to_first_token", cells.milliseconds),
    Column("", "ITL p50 ms", "inter_token_p50", cells.milliseconds),
    Column("", "ITL p99 ms", "inter_token_p99", cells.milliseconds),
)
_STALL = Column("", "stall p99 ms", "stall_p99", cells.milliseconds)
_TEMPERATURE = Column("", "temperature", "temperature", "{:g}".format)
_PREDICTION = (
    *(
        Column("", name, f"prediction.{name}", cells.times)
        for name in ("textbook", "predicted", "decoding", "measured")
    ),
    Column("", "pred./meas.", "prediction.predicted_by_measured", cells.number),
    Column("", "step ms predicted", "prediction.step", cells.milliseconds),
    Column("", "step ms measured", "prediction.measured_step", cells.milliseconds),
)


def _at_position(place: int) -> Column:
    """What was accepted there, with the number of drafts that reached it."""

    def shown(row: Row) -> str | None:
        if place >= len(row.drafts.reached):
            return None
        return f"{row.drafts.acceptance[place]:.2f} ({row.drafts.reached[place]})"

    return Column("", f"position {place + 1}", "", shown)


def _phase(name: str) -> Column:
    return Column("", f"{name} ms", "phases", lambda phases: cells.milliseconds(phases[name]))


_PHASES = (
    *map(_phase, PHASES),
    Column("", "step ms", "step", cells.milliseconds),
    Column("", "Python", "python", cells.share),
)


@dataclass
class ResultPages:
    """What the reports of all benchmarks have; the sections go into ``report``."""

    result: BenchResult
    report: Report
    label: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.label = labels([method.name for method in self.result.methods])
        self.method = Column("", "method", "method", self.label.__getitem__)
        drafting = {method.name for method in self.result.methods if method.speculates}

        def accepted(row: Row) -> str | None:
            rate = row.drafts.acceptance_rate
            if rate is None:
                silent = row.drafts.drafted == 0 and row.method in drafting
                return NONE_TRIED if silent else None
            return cells.share(rate)

        self.accepted = Column("", "accepted", "", accepted)

    def begin(
        self,
        what: str,
        amount: str,
        rounds: int,
        more: str = "",
        unfinished: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Where and how it was measured, and what must not be missed."""
        result, machine = self.result, self.result.machine
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        line = (
            f"{where}, {machine['dtype']}, torch {machine['torch']}; {what} from "
            f"{result.settings['source']}; {amount}; the methods take turns, "
            f"{rounds} {'round' if rounds == 1 else 'rounds'}{more}."
        )
        warnings = [line + "." for line in result.complaints()]
        if unfinished is not None:
            warnings.append(unfinished)
        told = [f"{name}: {spec}." for name, spec in result.specs().items()]
        if result.left_out:
            told.append(f"Left out, as too long for the model: {', '.join(result.left_out)}.")
        told += notes
        if result.settings.get("lossy"):
            told.append("Typical acceptance: sampled text is not the target's own.")
        self.report.add(
            "Run", Text(line), *(Text(words, warning=True) for words in warnings), *map(Text, told)
        )

    def by_method(
        self,
        figures: Sequence[Any],
        places: Sequence[Any],
        place: str,
        value: str,
        shown: Callable[[Any], Any] = lambda value: value,
    ) -> dict[str, list[Any]]:
        """The attribute ``value`` of every method's figures where ``place`` is each of ``places``;
        None where there is none."""
        key, what = attrgetter("method", place), attrgetter(value)
        found = {key(one): shown(what(one)) for one in figures if what(one) is not None}
        names = dict.fromkeys(one.method for one in figures)
        return {self.label[name]: [found.get((name, at)) for at in places] for name in names}

    def bars(self, title: str, name: str, places: Sequence[str], series: Any) -> Figure:
        """Speedups, with a line at plain decoding's."""
        return Figure(title, lambda: plots.bars(places, series, "speedup", baseline=1.0), name)

    def texts(self, note: str) -> None:
        counts = self.result.texts.counts
        if counts:
            found = {self.label[name]: Counter(own) for name, own in counts.items()}
            rows: list[list[Cell]] = [[n, *(own[k] for k in _KINDS)] for n, own in found.items()]
            self.report.add("Same text", Table(["method", *_KINDS], rows, note=note))

    def unequal(self) -> None:
        if self.result.unequal:
            engines = [{"name": self.label[n], **own} for n, own in self.result.unequal.items()]
            columns = [Column("", "engine", "name")]
            columns += [Column("", aspect.replace("_", " "), aspect) for aspect in ASPECTS]
            self.report.add("What could not be made equal", table_of(engines, columns, _UNEQUAL))


def report_of(result: BenchResult) -> Report:
    """The sections that the measurements give cause to."""
    pages = _Pages(result, Report(f"Benchmark of {result.model}"))
    interrupted = "Interrupted: these are the figures of what was complete."
    pages.begin(
        result.amount(),
        f"{result.settings['max_tokens']} tokens each",
        max((row.rounds for row in result.rows), default=0),
        unfinished=interrupted if result.interrupted else None,
    )
    for temperature in pages.temperatures:
        pages.overall(temperature)
    for temperature in pages.temperatures:
        pages.categories(temperature)
    pages.acceptance()
    for temperature in pages.temperatures:
        pages.concurrency(temperature)
    pages.temperature()
    pages.steps()
    pages.predictions()
    pages.texts(_TEXTS)
    pages.unequal()
    pages.perplexity()
    return pages.report


class _Pages(ResultPages):
    """One method a section; all read the same rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = self.result.rows
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
        columns = self._speeds(_MEDIAN_RATE)
        body: list[Sequence[Cell]] = []
        for name in names:
            own = table_of([row for row in rows if row.category == name], columns)
            body += [[name, *[None] * (len(columns) - 1)], *own.rows]
        series = self.by_method(rows, names, "category", "speedup.median")
        shown = self.by_method(rows, names, "category", "speedup.median", cells.times)
        place = self._at(temperature)
        title = "Speedup over the best plain decoding, by category" + place
        self.report.add(
            "By category" + place,
            Table(["speedup", *shown], list(zip(names, *shown.values(), strict=True))),
            self.bars(title, f"speedup{self._suffix(temperature)}", names, series),
            Table([column.heading for column in columns], body),
        )

    def acceptance(self) -> None:
        first = self._total(self.base, self.temperatures[0]) if self.rows else []
        rows = {self.label[row.method]: row for row in first if row.drafts.reached}
        if not rows:
            return
        depth = range(max(len(row.drafts.reached) for row in rows.values()))
        series = {name: list(row.drafts.acceptance) for name, row in rows.items()}
        places = [float(n + 1) for n in depth]
        self.report.add(
            "Acceptance by position",
            table_across(
                "", rows, [_LENGTH, self.accepted, *map(_at_position, depth)], _ACCEPTANCE
            ),
            Figure(
                "Acceptance by position in the draft, conditional",
                lambda: plots.lines(places, series, "position", "accepted"),
                "acceptance",
            ),
        )

    def concurrency(self, temperature: float) -> None:
        if len(self.counts) < 2:
            return
        rows = [row for count in self.counts for row in self._total(count, temperature)]
        note = _CONCURRENCY
        if any(method.alone for method in self.result.methods):
            note += " transformers answers one request at a time, so it runs at 1 only."
        columns = (_CLIENTS, self.method, _RATE, _SPEEDUP, _LENGTH, _TOKENS, *_LATENCIES)
        series = self.by_method(rows, self.counts, "concurrency", "tokens_per_second.median")
        places, place = list(map(float, self.counts)), self._at(temperature)
        self.report.add(
            "Concurrency" + place,
            table_of(rows, columns, note + self._repetition(rows)),
            Figure(
                "Throughput against concurrency" + place,
                lambda: plots.lines(places, series, "requests in flight", "tokens/s", log_x=True),
                f"concurrency{self._suffix(temperature)}",
            ),
        )

    def temperature(self) -> None:
        if len(self.temperatures) < 2:
            return
        rows = [row for t in self.temperatures for row in self._total(self.base, t)]
        columns = (_TEMPERATURE, self.method, _RATE, _SPEEDUP, self.accepted, _TOKENS)
        series = self.by_method(rows, self.temperatures, "temperature", "speedup.median")
        self.report.add(
            "Temperature",
            table_of(rows, columns, UNTRIED if NONE_TRIED in map(self.accepted.cell, rows) else ""),
            Figure(
                "Speedup against temperature",
                lambda: plots.lines(self.temperatures, series, "temperature", "speedup"),
                "temperature",
            ),
        )

    def steps(self) -> None:
        every = [row for count in self.counts for row in self._total(count, self.temperatures[0])]
        rows = [row for row in every if row.phases]
        if not rows:
            return
        own = [row for row in rows if row.concurrency == self.base]
        parts = {name: [row.phases[name] * 1e3 for row in own] for name in PHASES}
        methods = [self.label[row.method] for row in own]
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
        found = self.result.predictions
        if found:
            columns = [*_clients(found), self.method, *_PREDICTION]
            tables = [table_of(found, columns, _PREDICTED)]
            base = [item for item in found if item.concurrency == self.base]
            tables += [self._differences(base)] if base else []
            self.report.add("Predicted against measured speedup", *tables)

    def _differences(self, found: Sequence[Predicted]) -> Table:
        """From the predicted speedup to the measured one, reason by reason."""
        seen = {self.label[item.method]: item.prediction for item in found}
        moved = {label: {i.name: f"{i.speedup:+.2f}" for i in s.items} for label, s in seen.items()}
        reasons = dict.fromkeys(name for own in moved.values() for name in own)
        rows: list[Sequence[Cell]] = [
            ["predicted", *(cells.times(one.predicted) for one in seen.values())],
            *([name, *(own.get(name) for own in moved.values())] for name in reasons),
            ["measured", *(cells.times(one.measured) for one in seen.values())],
        ]
        return Table(["from predicted to measured speedup", *seen], rows)

    def perplexity(self) -> None:
        if self.result.perplexities:
            lines = [Text(found.line) for found in self.result.perplexities]
            self.report.add("Perplexity of the target", *lines)

    def _rows(self, concurrency: int, temperature: float) -> list[Row]:
        cell = concurrency, temperature
        return [row for row in self.rows if (row.concurrency, row.temperature) == cell]

    def _total(self, concurrency: int, temperature: float) -> list[Row]:
        """Rows over all categories."""
        rows = self._rows(concurrency, temperature)
        total = [row for row in rows if row.category in (OVERALL, EVERYTHING)]
        return total or rows  # one category is all there is

    def _at(self, temperature: float) -> str:
        told = temperature or len(self.temperatures) > 1
        return f" at temperature {temperature:g}" if told else ""

    def _suffix(self, temperature: float) -> str:
        return f"-t{temperature:g}" if len(self.temperatures) > 1 else ""

    def _speeds(self, rate: Column) -> list[Column]:
        columns = [self.method, rate, _SPEEDUP, *_LATENCIES, _STALL, _TOKENS]
        price = self.result.price
        if price is not None:
            cost = Column("", "cost", "", lambda row: f"{row.cost_per_million(price):.3g}")
            columns.append(cost)
        return columns

    def _repetition(self, rows: Sequence[Row]) -> str:
        """A drafter that remembers has an easy time with prompts that come again."""
        prompts = self.result.settings["prompts"] - len(self.result.left_out)
        remembering = [m.name for m in self.result.methods if m.remembers]
        if not remembering or all(row.requests <= prompts * row.rounds for row in rows):
            return ""
        names = ", ".join(self.label[name] for name in remembering)
        return f" Prompts are repeated to occupy all clients, which flatters {names}."


def _clients(items: Sequence[Any]) -> list[Column]:
    """A column for them, where there are several numbers of them."""
    return [_CLIENTS] if len({item.concurrency for item in items}) > 1 else []
