"""A benchmark's result as one report: tables for the terminal, and plots for files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.tools.bench import cells
from paceline.tools.bench.figures import OVERALL, Row
from paceline.tools.bench.predictions import Predicted
from paceline.tools.bench.result import BenchResult, labels
from paceline.tools.bench.runner import EVERYTHING
from paceline.tools.report import plots
from paceline.tools.report.document import Cell, Figure, Report, Table, Text

_NOTE = (
    "Medians over rounds, ± half of the range from the lowest to the highest. TTFT: median time to "
    "first token. ITL: gap before a delivery, divided by the tokens delivered together; stall: the "
    "undivided gap. Tokens a step: mean accepted length, the target's own token included."
)


def report_of(result: BenchResult) -> Report:
    """The sections that the measurements give cause to."""
    pages = _Pages(result)
    report = Report(f"Benchmark of {result.model}")
    report.add("Run", Text(pages.circumstances()), *pages.warnings())
    pages.overall(report)
    pages.categories(report)
    pages.acceptance(report)
    pages.concurrency(report)
    pages.temperature(report)
    pages.steps(report)
    pages.predictions(report)
    pages.texts(report)
    return report


class _Pages:
    """One method a section; all read the same rows."""

    def __init__(self, result: BenchResult) -> None:
        self.result = result
        self.rows = result.rows
        self.label = labels([method.name for method in result.methods])
        self.base = min((row.concurrency for row in self.rows), default=1)
        self.temperatures = list(dict.fromkeys(row.temperature for row in self.rows))

    # -- what is shown -------------------------------------------------------------------------

    def circumstances(self) -> str:
        machine, settings = self.result.machine, self.result.settings
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        rounds = max((row.rounds for row in self.rows), default=0)
        parts = [
            f"{where}, {machine['dtype']}, torch {machine['torch']}",
            f"{settings['prompts']} prompts from {settings['source']}",
            f"{settings['max_tokens']} tokens each",
            f"the methods take turns, {rounds} {'round' if rounds == 1 else 'rounds'}",
        ]
        return "; ".join(parts) + "."

    def warnings(self) -> list[Text]:
        found = [Text(line + ".", warning=True) for line in self.result.complaints()]
        if self.result.interrupted:
            found.append(
                Text("Interrupted: these are the figures of what was complete.", warning=True)
            )
        if self.result.left_out:
            names = ", ".join(self.result.left_out)
            found.append(Text(f"Left out, as too long for the model: {names}."))
        if self.result.settings.get("lossy"):
            found.append(Text("Typical acceptance: sampled text is not the target's own."))
        return found

    def overall(self, report: Report) -> None:
        for temperature in self.temperatures:
            rows = self._total(self.base, temperature)
            if rows:
                title = "Methods" + self._at(temperature)
                columns, lines = self._speed_columns(rows, spread=True)
                table = Table(["method", *columns], lines, note=_NOTE + self._price_note())
                report.add(title, table, Text(self._baseline(rows)))

    def categories(self, report: Report) -> None:
        for temperature in self.temperatures:
            rows = [
                row
                for row in self._at_base(temperature)
                if row.category not in (OVERALL, EVERYTHING)
            ]
            names = list(dict.fromkeys(row.category for row in rows))
            if not rows or (len(names) == 1 and len(self.temperatures) == 1 and not self._many()):
                continue
            columns, lines = self._speed_columns(rows)
            body: list[list[Cell]] = []
            for name in names:
                body.append([name, *[None] * len(columns)])
                body += [
                    line for row, line in zip(rows, lines, strict=True) if row.category == name
                ]
            place = self._at(temperature)
            report.add(
                "By category" + place,
                self._speedups(rows, names),
                Figure(
                    "Speedup over the best plain decoding, by category" + place,
                    lambda rows=rows, names=names: self._bars(rows, names),  # type: ignore[misc]
                    f"speedup{self._suffix(temperature)}",
                ),
                Table(["method", *columns], body),
            )

    def acceptance(self, report: Report) -> None:
        rows = (
            [row for row in self._total(self.base, self.temperatures[0]) if row.drafts.reached]
            if self.rows
            else []
        )
        if not rows:
            return
        depth = max(len(row.drafts.reached) for row in rows)
        body: list[list[Cell]] = [
            ["drafted a step", *(cells.number(row.drafts.length) for row in rows)],
            ["accepted", *(cells.share(row.drafts.acceptance_rate) for row in rows)],
        ]
        for place in range(depth):
            body.append([f"position {place + 1}", *(cells.acceptance(row, place) for row in rows)])
        columns = ["", *(self.label[row.method] for row in rows)]
        note = (
            "Conditional: of the drafts that had a token at this position, all before it accepted, "
            "the share whose token was accepted; in brackets how many drafts that were, over all "
            "rounds."
        )
        series = {self.label[row.method]: list(row.drafts.acceptance) for row in rows}
        places = [float(n + 1) for n in range(depth)]
        report.add(
            "Acceptance by position",
            Table(columns, body, note=note),
            Figure(
                "Acceptance by position in the draft, conditional",
                lambda: plots.lines(places, series, "position", "accepted"),
                "acceptance",
            ),
        )

    def concurrency(self, report: Report) -> None:
        counts = list(dict.fromkeys(row.concurrency for row in self.rows))
        if len(counts) < 2:
            return
        for temperature in self.temperatures:
            rows = [row for count in counts for row in self._total(count, temperature)]
            head = ["clients", "method", "tok/s", "speedup", "drafted a step", "tokens a step"]
            head += ["TTFT ms", "ITL p50 ms", "ITL p99 ms"]
            body: list[list[Cell]] = [
                [
                    row.concurrency,
                    self.label[row.method],
                    cells.rate(row.tokens_per_second),
                    cells.speedup(row.speedup),
                    cells.number(row.drafts.length),
                    cells.number(row.drafts.mean_accepted_length),
                    *cells.latencies(row)[:3],
                ]
                for row in rows
            ]
            note = (
                "All prompts; every client sends its next request when one is answered. Speedup is "
                "over the best plain decoding at the same concurrency."
            )
            if any(method.variant for method in self.result.methods):
                note += " transformers answers one request at a time, so it runs at 1 only."
            note += self._repetition(rows)
            place = self._at(temperature)
            report.add(
                "Concurrency" + place,
                Table(head, body, note=note),
                Figure(
                    "Throughput against concurrency" + place,
                    lambda rows=rows: self._throughput(rows, counts),  # type: ignore[misc]
                    f"concurrency{self._suffix(temperature)}",
                ),
            )

    def temperature(self, report: Report) -> None:
        if len(self.temperatures) < 2:
            return
        rows = [row for t in self.temperatures for row in self._total(self.base, t)]
        body: list[list[Cell]] = [
            [
                f"{row.temperature:g}",
                self.label[row.method],
                cells.rate(row.tokens_per_second),
                cells.speedup(row.speedup),
                cells.share(row.drafts.acceptance_rate),
                cells.number(row.drafts.mean_accepted_length),
            ]
            for row in rows
        ]
        series = self._series(rows, lambda row: row.speedup.median)
        report.add(
            "Temperature",
            Table(["temperature", "method", "tok/s", "speedup", "accepted", "tokens a step"], body),
            Figure(
                "Speedup against temperature",
                lambda: plots.lines(self.temperatures, series, "temperature", "speedup"),
                "temperature",
            ),
        )

    def steps(self, report: Report) -> None:
        rows = [
            row
            for count in dict.fromkeys(row.concurrency for row in self.rows)
            for row in self._total(count, self.temperatures[0])
            if row.phases
        ]
        if not rows:
            return
        names = list(rows[0].phases)
        many = len({row.concurrency for row in rows}) > 1
        body: list[list[Cell]] = []
        for row in rows:
            whole = sum(row.phases.values())
            times = [cells.milliseconds(row.phases[name]) for name in names]
            other = cells.share(row.phases["other"] / whole if whole else None)
            start: list[Cell] = [row.concurrency] if many else []
            body.append([*start, self.label[row.method], *times, cells.milliseconds(whole), other])
        head = [*(["clients"] if many else []), "method"]
        head += [*(f"{name} ms" for name in names), "step ms", "Python"]
        shown = [row for row in rows if row.concurrency == self.base]
        parts = {name: [row.phases[name] * 1e3 for row in shown] for name in names}
        note = (
            "Mean over steps in which nobody reads a prompt. target: its forward; verify: "
            "distributions, rule, transfer; other: scheduling, batching and bookkeeping in Python."
        )
        report.add(
            "Time per step",
            Table(head, body, note=note),
            Figure(
                "Where a step's time goes",
                lambda: plots.stacks(
                    [self.label[row.method] for row in shown], parts, "ms per step"
                ),
                "steps",
            ),
        )

    def predictions(self, report: Report) -> None:
        found = self.result.predictions
        if not found:
            return
        many = len({item.concurrency for item in found}) > 1
        body: list[list[Cell]] = []
        for item in found:
            seen = item.prediction
            speedups = (seen.textbook, seen.predicted, seen.decoding, seen.measured)
            steps = (seen.step, seen.measured_step)
            start: list[Cell] = [item.concurrency] if many else []
            start += [self.label[item.method], *map(cells.times, speedups)]
            start.append(f"{seen.predicted_by_measured:.2f}")
            body.append([*start, *map(cells.milliseconds, steps)])
        head = [*(["clients"] if many else []), "method", "textbook", "predicted", "decoding"]
        head += ["measured", "pred./meas.", "step ms predicted", "step ms measured"]
        note = (
            "Speedups over our own plain decoding. textbook: (1 - a^(g+1)) / ((1 - a)(g c + 1)); "
            "predicted: acceptance by position, and forwards of target and drafter measured alone; "
            "decoding: measured, without the steps that read prompts; measured: whole runs."
        )
        why = self._differences([item for item in found if item.concurrency == self.base])
        report.add("Predicted against measured speedup", Table(head, body, note=note), *why)

    def _differences(self, found: Sequence[Predicted]) -> list[Table]:
        """From the predicted speedup to the measured one, reason by reason."""
        if not found:
            return []
        seen = [item.prediction for item in found]
        shares = [{reason.name: reason.speedup for reason in one.items} for one in seen]
        body: list[list[Cell]] = [["predicted", *(cells.times(one.predicted) for one in seen)]]
        body += [
            [name, *(f"{own[name]:+.2f}" if name in own else None for own in shares)]
            for name in dict.fromkeys(name for own in shares for name in own)
        ]
        body.append(["measured", *(cells.times(one.measured) for one in seen)])
        heads = [self.label[item.method] for item in found]
        return [Table(["from predicted to measured speedup", *heads], body)]

    def texts(self, report: Report) -> None:
        counts = self.result.texts.counts
        if not counts:
            return
        kinds = ("identical", "near tie", "different")
        body: list[list[Cell]] = [
            [self.label[name], *(found.get(kind, 0) for kind in kinds)]
            for name, found in counts.items()
        ]
        note = (
            "Texts beside plain decoding's. Near tie: where they part, the two tokens' scores are "
            "within the rounding of the dtype. A different text of ours is a bug; transformers "
            "computes in another order and may differ by more."
        )
        report.add("Same text", Table(["method", *kinds], body, note=note))

    # -- rows and cells ------------------------------------------------------------------------

    def _total(self, concurrency: int, temperature: float) -> list[Row]:
        """Rows over all categories."""
        rows = [
            row
            for row in self.rows
            if row.concurrency == concurrency and row.temperature == temperature
        ]
        total = [row for row in rows if row.category in (OVERALL, EVERYTHING)]
        return total or rows  # one category is all there is

    def _at_base(self, temperature: float) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.concurrency == self.base and row.temperature == temperature
        ]

    def _many(self) -> bool:
        return any(row.category == OVERALL for row in self.rows)

    def _at(self, temperature: float) -> str:
        return (
            f" at temperature {temperature:g}" if temperature or len(self.temperatures) > 1 else ""
        )

    def _suffix(self, temperature: float) -> str:
        return f"-t{temperature:g}" if len(self.temperatures) > 1 else ""

    def _baseline(self, rows: Sequence[Row]) -> str:
        best = self.label[rows[0].best_plain]
        return f"Speedup is over the best plain decoding in the same rounds: {best}."

    def _price_note(self) -> str:
        price = self.result.price
        return "" if price is None else f" Cost: of a million tokens, at {price:g} a machine hour."

    def _speed_columns(
        self, rows: Sequence[Row], spread: bool = False
    ) -> tuple[list[str], list[list[Cell]]]:
        """``spread``: of tokens a second too; that of the speedup is always there."""
        price = self.result.price
        columns = ["tok/s", "speedup", "TTFT ms", "ITL p50 ms", "ITL p99 ms", "stall p99 ms"]
        columns += ["tokens a step", *([] if price is None else ["cost"])]
        lines: list[list[Cell]] = []
        for row in rows:
            speed = row.tokens_per_second
            line: list[Cell] = [self.label[row.method]]
            line.append(cells.rate(speed) if spread else f"{speed.median:.0f}")
            line += [cells.speedup(row.speedup), *cells.latencies(row)]
            line.append(cells.number(row.drafts.mean_accepted_length))
            if price is not None:
                line.append(f"{row.cost_per_million(price):.3g}")
            lines.append(line)
        return columns, lines

    def _repetition(self, rows: Sequence[Row]) -> str:
        """A drafter that remembers has an easy time with prompts that come again."""
        prompts = self.result.settings["prompts"] - len(self.result.left_out)
        remembering = [m.name for m in self.result.methods if m.remembers]
        if not remembering or all(row.requests <= prompts * row.rounds for row in rows):
            return ""
        names = ", ".join(self.label[name] for name in remembering)
        return f" Prompts are repeated to occupy all clients, which flatters {names}."

    def _speedups(self, rows: Sequence[Row], names: Sequence[str]) -> Table:
        methods = list(dict.fromkeys(row.method for row in rows))
        found = {(row.category, row.method): row.speedup.median for row in rows}
        body: list[list[Cell]] = [
            [name, *(cells.times(found.get((name, method))) for method in methods)]
            for name in names
        ]
        heads = [self.label[method] for method in methods]
        return Table(["speedup", *heads], body)

    def _bars(self, rows: Sequence[Row], names: Sequence[str]) -> str:
        methods = list(dict.fromkeys(row.method for row in rows))
        found = {(row.category, row.method): row.speedup.median for row in rows}
        series = {self.label[m]: [found.get((name, m)) for name in names] for m in methods}
        return plots.bars(names, series, "speedup", baseline=1.0)

    def _throughput(self, rows: Sequence[Row], counts: Sequence[int]) -> str:
        found = {(row.method, row.concurrency): row.tokens_per_second.median for row in rows}
        methods = list(dict.fromkeys(row.method for row in rows))
        series = {self.label[m]: [found.get((m, count)) for count in counts] for m in methods}
        places = [float(count) for count in counts]
        return plots.lines(places, series, "requests in flight", "tokens/s", log_x=True)

    def _series(
        self, rows: Sequence[Row], value: Callable[[Row], float]
    ) -> dict[str, list[float | None]]:
        found = {(row.method, row.temperature): value(row) for row in rows}
        methods = list(dict.fromkeys(row.method for row in rows))
        return {self.label[m]: [found.get((m, t)) for t in self.temperatures] for m in methods}
