"""A benchmark's result as one report: tables for the terminal, and plots for files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.engine.clock import PHASES
from paceline.tools.bench import cells
from paceline.tools.bench.figures import OVERALL, Row
from paceline.tools.bench.predict import Prediction
from paceline.tools.bench.predictions import Predicted
from paceline.tools.bench.result import BenchResult, labels
from paceline.tools.bench.runner import EVERYTHING
from paceline.tools.report import plots
from paceline.tools.report.document import Cell, Figure, Report, Table, Text, shown

_NOTE = (
    "Medians over rounds, ± half of the range from the lowest to the highest. TTFT: median time to "
    "first token. ITL: gap before a delivery, divided by the tokens delivered together; stall: the "
    "undivided gap. Tokens a step: mean accepted length, the target's own token included."
)
_ACCEPTANCE = (
    "Conditional: of the drafts that had a token at this position, all before it accepted, the "
    "share whose token was accepted; in brackets how many drafts that were, over all rounds."
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
_KINDS = ("identical", "near tie", "different")
_LATENCIES = ("TTFT ms", "ITL p50 ms", "ITL p99 ms")
_CONCURRENCY = (
    *("clients", "method", "tok/s", "speedup", "drafted a step", "tokens a step"),
    *_LATENCIES,
)
Columns = dict[str, Callable[[Row], Cell]]


def report_of(result: BenchResult) -> Report:
    """The sections that the measurements give cause to."""
    pages = _Pages(result)
    report = Report(f"Benchmark of {result.model}")
    interrupted = "Interrupted: these are the figures of what was complete."
    warnings = pages.warnings(interrupted if result.interrupted else None)
    report.add("Run", Text(pages.circumstances()), *warnings)
    pages.overall(report)
    pages.categories(report)
    pages.acceptance(report)
    pages.concurrency(report)
    pages.temperature(report)
    pages.steps(report)
    pages.predictions(report)
    pages.texts(report, _TEXTS)
    return report


class ResultPages:
    """What the reports of all benchmarks have."""

    def __init__(self, result: BenchResult) -> None:
        self.result = result
        self.label = labels([method.name for method in result.methods])

    def run_line(self, what: str, amount: str, rounds: int, *more: str) -> str:
        """Where and how it was measured."""
        machine = self.result.machine
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        turns = f"the methods take turns, {rounds} {'round' if rounds == 1 else 'rounds'}"
        stack = f"{machine['dtype']}, torch {machine['torch']}"
        source = f"{what} from {self.result.settings['source']}"
        return "; ".join([f"{where}, {stack}", source, amount, turns, *more]) + "."

    def warnings(self, unfinished: str | None, *notes: str) -> list[Text]:
        found = [Text(line + ".", warning=True) for line in self.result.complaints()]
        if unfinished is not None:
            found.append(Text(unfinished, warning=True))
        if self.result.left_out:
            names = ", ".join(self.result.left_out)
            found.append(Text(f"Left out, as too long for the model: {names}."))
        found += map(Text, notes)
        if self.result.settings.get("lossy"):
            found.append(Text("Typical acceptance: sampled text is not the target's own."))
        return found

    def by_method(
        self,
        figures: Iterable[Any],
        places: Sequence[Any],
        place: Callable[[Any], Any],
        value: Callable[[Any], Any],
    ) -> dict[str, list[Any]]:
        """The value of every method at all places; None where there is none."""
        found = {(one.method, place(one)): value(one) for one in figures}
        names = dict.fromkeys(method for method, _ in found)
        return {self.label[name]: [found.get((name, at)) for at in places] for name in names}

    def texts(self, report: Report, note: str) -> None:
        counts = self.result.texts.counts
        if counts:
            rows: list[list[Cell]] = [
                [self.label[name], *(found.get(kind, 0) for kind in _KINDS)]
                for name, found in counts.items()
            ]
            report.add("Same text", Table(["method", *_KINDS], rows, note=note))


def _category(row: Row) -> str:
    return row.category


def _clients(row: Row) -> int:
    return row.concurrency


def _speedup(row: Row) -> float:
    return row.speedup.median


class _Pages(ResultPages):
    """One method a section; all read the same rows."""

    def __init__(self, result: BenchResult) -> None:
        super().__init__(result)
        self.rows = result.rows
        self.counts = list(dict.fromkeys(map(_clients, self.rows)))
        self.base = min(self.counts, default=1)
        self.temperatures = list(dict.fromkeys(row.temperature for row in self.rows))
        self.columns = self._columns()

    # -- what is shown -------------------------------------------------------------------------

    def circumstances(self) -> str:
        settings = self.result.settings
        rounds = max((row.rounds for row in self.rows), default=0)
        amount = f"{settings['max_tokens']} tokens each"
        return self.run_line(f"{settings['prompts']} prompts", amount, rounds)

    def overall(self, report: Report) -> None:
        price = self.result.price
        cost = "" if price is None else f" Cost: of a million tokens, at {price:g} a machine hour."
        for temperature in self.temperatures:
            rows = self._total(self.base, temperature)
            if rows:
                best = self.label[rows[0].best_plain]
                report.add(
                    "Methods" + self._at(temperature),
                    self._table(rows, *self._speeds("tok/s"), note=_NOTE + cost),
                    Text(f"Speedup is over the best plain decoding in the same rounds: {best}."),
                )

    def categories(self, report: Report) -> None:
        many = any(row.category == OVERALL for row in self.rows)
        heads = self._speeds("median tok/s")
        for temperature in self.temperatures:
            every = self._rows(self.base, temperature)
            rows = [row for row in every if row.category not in (OVERALL, EVERYTHING)]
            names = list(dict.fromkeys(map(_category, rows)))
            if not rows or (len(names) == 1 and len(self.temperatures) == 1 and not many):
                continue
            body: list[Sequence[Cell]] = []
            for name in names:
                own = [row for row in rows if row.category == name]
                body += [[name, *[None] * (len(heads) - 1)], *self._table(own, *heads).rows]
            series = self.by_method(rows, names, _category, _speedup)
            place = self._at(temperature)
            lines = [
                [name, *map(cells.times, values)]
                for name, values in zip(names, zip(*series.values(), strict=True), strict=True)
            ]
            report.add(
                "By category" + place,
                Table(["speedup", *series], lines),
                Figure(
                    "Speedup over the best plain decoding, by category" + place,
                    lambda names=names, series=series: plots.bars(  # type: ignore[misc]
                        names, series, "speedup", baseline=1.0
                    ),
                    f"speedup{self._suffix(temperature)}",
                ),
                Table([head.removeprefix("median ") for head in heads], body),
            )

    def acceptance(self, report: Report) -> None:
        first = self._total(self.base, self.temperatures[0]) if self.rows else []
        rows = {self.label[row.method]: row for row in first if row.drafts.reached}
        if not rows:
            return
        depth = max(len(row.drafts.reached) for row in rows.values())
        table = {head: self.columns[head] for head in ("drafted a step", "accepted")}
        for at in range(depth):
            table[f"position {at + 1}"] = lambda row, at=at: cells.acceptance(row, at)  # type: ignore[misc]
        series = {name: list(row.drafts.acceptance) for name, row in rows.items()}
        places = [float(n + 1) for n in range(depth)]
        report.add(
            "Acceptance by position",
            Table.across("", rows, table, note=_ACCEPTANCE),
            Figure(
                "Acceptance by position in the draft, conditional",
                lambda: plots.lines(places, series, "position", "accepted"),
                "acceptance",
            ),
        )

    def concurrency(self, report: Report) -> None:
        if len(self.counts) < 2:
            return
        for temperature in self.temperatures:
            rows = [row for count in self.counts for row in self._total(count, temperature)]
            note = (
                "All prompts; every client sends its next request when one is answered. Speedup is "
                "over the best plain decoding at the same concurrency."
            )
            if any(method.variant for method in self.result.methods):
                note += " transformers answers one request at a time, so it runs at 1 only."
            place = self._at(temperature)
            report.add(
                "Concurrency" + place,
                self._table(rows, *_CONCURRENCY, note=note + self._repetition(rows)),
                Figure(
                    "Throughput against concurrency" + place,
                    lambda rows=rows: self._throughput(rows),  # type: ignore[misc]
                    f"concurrency{self._suffix(temperature)}",
                ),
            )

    def temperature(self, report: Report) -> None:
        if len(self.temperatures) < 2:
            return
        rows = [row for t in self.temperatures for row in self._total(self.base, t)]
        series = self.by_method(rows, self.temperatures, lambda row: row.temperature, _speedup)
        report.add(
            "Temperature",
            self._table(
                rows, "temperature", "method", "tok/s", "speedup", "accepted", "tokens a step"
            ),
            Figure(
                "Speedup against temperature",
                lambda: plots.lines(self.temperatures, series, "temperature", "speedup"),
                "temperature",
            ),
        )

    def steps(self, report: Report) -> None:
        every = [row for count in self.counts for row in self._total(count, self.temperatures[0])]
        rows = [row for row in every if row.phases]
        if not rows:
            return
        many = ["clients"] if len(set(map(_clients, rows))) > 1 else []
        names = list(rows[0].phases)
        heads = [*many, "method", *(f"{name} ms" for name in names), "step ms", "Python"]
        own = [row for row in rows if row.concurrency == self.base]
        parts = {name: [row.phases[name] * 1e3 for row in own] for name in names}
        bars = [self.label[row.method] for row in own]
        report.add(
            "Time per step",
            self._table(rows, *heads, note=_STEPS),
            Figure(
                "Where a step's time goes",
                lambda: plots.stacks(bars, parts, "ms per step"),
                "steps",
            ),
        )

    def predictions(self, report: Report) -> None:
        found = self.result.predictions
        if not found:
            return
        columns: dict[str, Callable[[Predicted], Cell]] = {}
        if len({item.concurrency for item in found}) > 1:
            columns["clients"] = lambda item: item.concurrency
        columns |= {
            "method": lambda item: self.label[item.method],
            "textbook": lambda item: cells.times(item.prediction.textbook),
            "predicted": lambda item: cells.times(item.prediction.predicted),
            "decoding": lambda item: cells.times(item.prediction.decoding),
            "measured": lambda item: cells.times(item.prediction.measured),
            "step ms predicted": lambda item: cells.milliseconds(item.prediction.step),
            "step ms measured": lambda item: cells.milliseconds(item.prediction.measured_step),
        }
        why = self._differences([item for item in found if item.concurrency == self.base])
        table = Table.of(found, columns, note=_PREDICTED)
        report.add("Predicted against measured speedup", table, *why)

    def _differences(self, found: Sequence[Predicted]) -> list[Table]:
        """From the predicted speedup to the measured one, reason by reason."""
        if not found:
            return []
        seen = {self.label[item.method]: item.prediction for item in found}
        rows: dict[str, Callable[[Prediction], Cell]] = {
            "predicted": lambda one: cells.times(one.predicted)
        }
        for name in dict.fromkeys(name for one in seen.values() for name in one.reasons):
            rows[name] = lambda one, name=name: shown(one.reasons.get(name), "{:+.2f}")  # type: ignore[misc]
        rows["measured"] = lambda one: cells.times(one.measured)
        return [Table.across("from predicted to measured speedup", seen, rows)]

    # -- rows and cells ------------------------------------------------------------------------

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

    def _columns(self) -> Columns:
        """All there are, by their headings; a table names those that it has."""
        price, milliseconds = self.result.price or 0.0, cells.milliseconds
        columns: Columns = {
            "clients": _clients,
            "method": lambda row: self.label[row.method],
            "temperature": lambda row: f"{row.temperature:g}",
            "tok/s": lambda row: cells.rate(row.tokens_per_second),
            "median tok/s": lambda row: f"{row.tokens_per_second.median:.0f}",
            "speedup": lambda row: cells.speedup(row.speedup),
            "drafted a step": lambda row: cells.number(row.drafts.length),
            "accepted": lambda row: cells.share(row.drafts.acceptance_rate),
            "tokens a step": lambda row: cells.number(row.drafts.mean_accepted_length),
            "TTFT ms": lambda row: milliseconds(row.time_to_first_token),
            "ITL p50 ms": lambda row: milliseconds(row.inter_token_p50),
            "ITL p99 ms": lambda row: milliseconds(row.inter_token_p99),
            "stall p99 ms": lambda row: milliseconds(row.stall_p99),
            "cost": lambda row: f"{row.cost_per_million(price):.3g}",
            "step ms": lambda row: milliseconds(row.step),
            "Python": lambda row: cells.share(row.phases["other"] / row.step if row.step else None),
        }
        for phase in PHASES:
            columns[f"{phase} ms"] = lambda row, phase=phase: milliseconds(row.phases[phase])  # type: ignore[misc]
        return columns

    def _table(self, rows: Sequence[Row], *heads: str, note: str = "") -> Table:
        return Table.of(rows, {head: self.columns[head] for head in heads}, note=note)

    def _speeds(self, rate: str) -> list[str]:
        cost = [] if self.result.price is None else ["cost"]
        return ["method", rate, "speedup", *_LATENCIES, "stall p99 ms", "tokens a step", *cost]

    def _repetition(self, rows: Sequence[Row]) -> str:
        """A drafter that remembers has an easy time with prompts that come again."""
        prompts = self.result.settings["prompts"] - len(self.result.left_out)
        remembering = [m.name for m in self.result.methods if m.remembers]
        if not remembering or all(row.requests <= prompts * row.rounds for row in rows):
            return ""
        names = ", ".join(self.label[name] for name in remembering)
        return f" Prompts are repeated to occupy all clients, which flatters {names}."

    def _throughput(self, rows: Sequence[Row]) -> str:
        series = self.by_method(
            rows, self.counts, _clients, lambda row: row.tokens_per_second.median
        )
        places = [float(count) for count in self.counts]
        return plots.lines(places, series, "requests in flight", "tokens/s", log_x=True)
