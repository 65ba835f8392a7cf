"""The report of a benchmark: the verdict, then tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from paceline.lab.bench.result import OVERALL, BenchResult, Row
from paceline.lab.bench.runner import ALL_PROMPTS
from paceline.lab.report.document import (
    NOTES,
    Column,
    Report,
    Table,
    Text,
    milliseconds,
    number,
    share,
    table_across,
    table_of,
    times,
)

_NOTES = NOTES["bench"]
_RATE = Column("", "tok/s", "tokens_per_second", methodcaller("shown", 0))
_TOKENS_PER_STEP = Column("", "tokens/step", "drafts.mean_accepted_length", number)
_SPEEDS = (
    _RATE,
    Column("", "speedup", "speedup", methodcaller("shown", 2, "x")),
    Column("", "95 %", "interval", lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}x"),
    _TOKENS_PER_STEP,
)
_LATENCIES = (
    Column("", "TTFT ms", "time_to_first_token", milliseconds),
    Column("", "ITL p50 ms", "inter_token_p50", milliseconds),
    Column("", "ITL p99 ms", "inter_token_p99", milliseconds),
    Column("", "stall p99 ms", "stall_p99", milliseconds),
)
_SWEPT = (
    Column("", "clients", "concurrency"),
    Column("", "temperature", "temperature", "{:g}".format),
)
_DRAFTED = Column("", "drafted/step", "drafts.length", number)
_ACCEPTED = Column("", "accepted", "drafts.acceptance_rate", share)
# Tables with a column for each category.
_BY_CATEGORY: tuple[tuple[Column, str], ...] = (
    (Column("", "", "speedup.median", times), "Speedup."),
    (_TOKENS_PER_STEP, "Tokens per target step."),
)


def _acceptance_at(position: int, drafts: Mapping[str, Any]) -> str | None:
    """The acceptance rate at a position, and in brackets how many drafts reached it."""
    if position > len(drafts["reached"]):
        return None
    return f"{drafts['acceptance'][position - 1]:.2f} ({drafts['reached'][position - 1]})"


def report_of(result: BenchResult) -> Report:
    """The report of a result with at least one row."""
    pages = _Pages(result)
    pages.verdict()
    pages.run()
    pages.methods()
    for temperature in pages.temperatures:
        pages.categories(temperature)
    pages.acceptance()
    pages.texts()
    if result.spending is not None:
        pages.report.add("Time", Text(result.spending.line))
    return pages.report


class _Pages:
    """Builds the report; each method adds a section."""

    def __init__(self, result: BenchResult) -> None:
        self.report = Report(f"Benchmark of {result.model}")
        self.result, self.rows = result, result.rows
        self.drafting = {method.name for method in result.methods if method.draft}
        self.label = labels([method.name for method in result.methods])
        self.method = Column("", "method", "method", self.label.__getitem__)
        self.base = min(row.concurrency for row in self.rows)
        self.temperatures = list(dict.fromkeys(row.temperature for row in self.rows))
        single = len({row.category for row in self.rows if row.concurrency == self.base}) == 1
        self.totals = [r for r in self.rows if single or r.category in (OVERALL, ALL_PROMPTS)]
        self.main = self.at(self.totals, self.temperatures[0])

    def at(self, rows: Sequence[Row], temperature: float) -> list[Row]:
        """The rows at the lowest concurrency and this temperature."""
        return [r for r in rows if (r.concurrency, r.temperature) == (self.base, temperature)]

    def swept(self, rows: Sequence[Row]) -> list[Column]:
        """Columns for the settings that vary among the rows, and for the method."""
        varying = [c for c in _SWEPT if len({c.value(row) for row in rows}) > 1]
        return [*varying, self.method]

    def verdict(self) -> None:
        """Name the fastest drafter, at the lowest concurrency and the first temperature. Drafters
        without accepted drafts or with wrong texts are left out."""
        eligible = self.drafting - {*self.result.idle, *self.result.bugs()}
        rows = [row for row in self.main if row.method in eligible]
        if not rows:
            return
        best = max(rows, key=lambda row: row.speedup.median)
        low, high = best.interval or (best.speedup.low, best.speedup.high)
        figures = f"{best.speedup.median:.2f}x the speed of plain decoding"
        if best.interval or best.rounds > 1:
            figures += f" ({low:.2f} to {high:.2f})"
        spec = next(m.draft for m in self.result.methods if m.name == best.method)
        name = f"--draft {spec}" if best.method == "draft" else self.label[best.method]
        line = f"use {name}: {figures}"
        if best.speedup.median <= 1:
            line = f"use no draft: the best, {name}, reaches {figures}"
        elif low < 1:
            line = f"undecided, give more --seconds: {name} reaches {figures}"
        texts = self.result.texts.get(best.method)
        same = "" if texts is None else f" {texts.shown} texts are the same."
        self.report.add("Verdict", Text(f"{line}.{same}"))

    def run(self) -> None:
        """Machine, settings and warnings."""
        result, machine, settings = self.result, self.result.machine, self.result.settings
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        rounds = max(row.rounds for row in result.rows)
        wanted = settings["prompts"]
        alone = (row.jobs_per_round for row in result.rows if row.concurrency == 1)
        measured = min(wanted, max(alone, default=wanted))
        how = (
            f"{measured} of {wanted} prompts from {settings['source']}; at most "
            f"{settings['max_tokens']} tokens per answer; the methods take turns, {rounds} "
            f"{'round' if rounds == 1 else 'rounds'}"
        )
        drafts = {method.name.partition("@")[0]: method.draft for method in result.methods}
        lines = [f"{name}: {spec}." for name, spec in drafts.items() if spec not in (None, name)]
        if result.left_out:
            lines.append(f"Left out because too long for the model: {', '.join(result.left_out)}.")
        self.report.add(
            "Run",
            Text(f"{where}, {machine['dtype']}, torch {machine['torch']}; {how}."),
            *(Text(words, warning=True) for words in result.warnings()),
            *map(Text, lines),
        )

    def methods(self) -> None:
        note = _NOTES["methods"]
        swept = self.swept(self.totals)
        columns = [*swept, *_SPEEDS, _ACCEPTED]
        if len({row.concurrency for row in self.totals}) > 1:
            note += f" {_NOTES['clients']}"
        self.report.add("Methods", table_of(self.totals, columns, note))
        latencies = table_of(self.totals, [*swept, *_LATENCIES], _NOTES["latency"])
        self.report.add("Latency", latencies, detail=True)

    def categories(self, temperature: float) -> None:
        """Speedup and tokens per step by category, if there are several."""
        rows = self.at(self.rows, temperature)
        categories = dict.fromkeys(row.category for row in rows)
        names = [name for name in categories if name not in (OVERALL, ALL_PROMPTS)]
        if len(names) < 2:
            return
        title = "By category"
        if len(self.temperatures) > 1 or temperature:
            title += f" at temperature {temperature:g}"
        tables, methods = list[Table](), dict.fromkeys(row.method for row in rows)
        for column, note in _BY_CATEGORY:
            cells = {(row.method, row.category): column.cell(row) for row in rows}
            lines = [[self.label[m], *(cells.get((m, n)) for n in names)] for m in methods]
            tables.append(Table(["method", *names], lines, note=note))
        self.report.add(title, *tables, detail=True)

    def acceptance(self) -> None:
        rows = {self.label[row.method]: row for row in self.main if row.drafts["reached"]}
        if not rows:
            return
        positions = range(1, 1 + max(len(row.drafts["acceptance"]) for row in rows.values()))
        columns = (
            Column("", f"position {n}", "drafts", partial(_acceptance_at, n)) for n in positions
        )
        table = table_across("", rows, [_DRAFTED, _ACCEPTED, *columns], _NOTES["acceptance"])
        self.report.add("Acceptance by position", table, detail=True)

    def texts(self) -> None:
        rows = [[self.label[name], texts.shown] for name, texts in self.result.texts.items()]
        self.report.add(
            "Same text as plain decoding", Table(["method", "texts"], rows), detail=True
        )


def labels(names: Sequence[str]) -> dict[str, str]:
    """Short names for tables: paths are cut to their last part if they stay distinct."""
    short = {name: re.sub(r"[^:+,@=]*/(?=[^/])", "", name) for name in names}
    used = list(short.values())
    return {name: text if used.count(text) == 1 else name for name, text in short.items()}
