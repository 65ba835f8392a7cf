"""The certificate: verdict, tables, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.lab.certify.chisquare import POWER, ChiSquare, RankCounts
from paceline.lab.report.document import NOTES, Column, Report, Text, record_of, table_of

# The minimum of evidence for the verdict CERTIFIED, whatever the effort settings ask for.
MIN_TEXTS = 2  # compared in every setting
ALPHA = 0.001  # probability that a lossless engine fails any of the distribution tests
MAX_BIAS = 0.25  # a larger bias must have been detectable


@dataclass(frozen=True)
class Problem:
    """Something wrong: the part of the certification, and a one-line description."""

    part: str
    what: str


@dataclass(frozen=True)
class DistributionTest:
    """A test at level ``alpha`` that tokens follow their distributions. ``what`` the tokens are; if
    the test fails, that is a problem of ``part``."""

    part: str
    what: str
    outcome: ChiSquare
    alpha: float

    @property
    def smallest_bias(self) -> float:
        return self.outcome.smallest_bias(self.alpha)

    @property
    def problems(self) -> list[Problem]:
        if self.outcome.p_value >= self.alpha:
            return []
        odds = f"p = {self.outcome.p_value:.1g}, {self.outcome.samples} tokens"
        return [Problem(self.part, f"{self.what} are biased ({odds})")]


def rank_tests(tested: Sequence[tuple[str, str, RankCounts]]) -> list[DistributionTest]:
    """Tests of ranks, each given with its part and what its tokens are. Few tokens, and certain
    ones, give no test. Each has the same share of ``ALPHA`` (Bonferroni)."""
    outcomes = [(part, what, ranks.test()) for part, what, ranks in tested]
    enough = [outcome for outcome in outcomes if outcome[2].df > 0]
    return [DistributionTest(*outcome, ALPHA / len(enough)) for outcome in enough]


def missing_evidence(texts: int, bias: float) -> list[str]:
    """Why the evidence is not enough, if it is not: ``texts`` compared in every setting, and tests
    whose smallest detectable bias is ``bias``."""
    lacks = []
    if texts < MIN_TEXTS:
        lacks.append(f"whole texts compared: {texts}, not {MIN_TEXTS}")
    if bias > MAX_BIAS:
        lacks.append(f"only a bias of {bias:.0%} or more would have been detected in the samples")
    return lacks


def smallest_bias(tests: Sequence[DistributionTest]) -> float:
    """The total variation distance that all tests of sampled text would have detected."""
    return max((test.smallest_bias for test in tests if test.part == "sampling"), default=1.0)


@dataclass(frozen=True)
class ResultTable:
    """Results of one kind: a section of the report, and a list in JSON."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str = ""


def tests_table(tests: Sequence[DistributionTest]) -> ResultTable:
    columns = (
        Column("what", "tested"),
        Column("samples", "tokens", "outcome.samples"),
        Column("statistic", "chi2", "outcome.statistic", "{:.1f}".format),
        Column("degrees_of_freedom", "df", "outcome.df"),
        Column("p_value", "p", "outcome.p_value", "{:.2g}".format),
        Column("alpha", "fails below", shown="{:.1g}".format),
        Column("smallest_bias", "detects", shown="{:.1%}".format),
    )
    note = NOTES["certify"]["tests"].format(POWER)
    return ResultTable("tests", "Distribution of sampled text", columns, tests, note)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome. ``lossless`` only if there are no problems and enough was tested.

    ``facts``: further entries of the JSON. ``tables``: the results. ``missing_evidence``: what a
    certificate lacks. ``notes``: what was left out, and why. ``completed``: a line on what was done
    in which time; ``certified``: what the verdict CERTIFIED says in this case."""

    title: str
    facts: Mapping[str, Any]
    tables: Sequence[ResultTable]
    problems: Sequence[Problem]
    missing_evidence: Sequence[str]
    notes: Sequence[str]
    completed: str
    certified: str

    def rows(self, key: str) -> Sequence[Any]:
        return next(table.rows for table in self.tables if table.key == key)

    @property
    def lossless(self) -> bool:
        return not self.problems and not self.missing_evidence

    @property
    def verdict(self) -> str:
        if self.problems:
            first, *others = self.problems
            more = f" (and {len(others)} more)" if others else ""
            return f"NOT LOSSLESS: {first.part}: {first.what}{more}"
        if self.missing_evidence:
            lacks = "; ".join(self.missing_evidence)
            return f"NOT ENOUGH: {lacks}; no problem in what was tested"
        return f"CERTIFIED: {self.certified}"

    def record(self) -> dict[str, Any]:
        names = ("lossless", "verdict", "missing_evidence", "notes")
        return {
            **{name: getattr(self, name) for name in names},
            **self.facts,
            "problems": [asdict(problem) for problem in self.problems],
            **{t.key: [record_of(row, t.columns) for row in t.rows] for t in self.tables},
        }

    def report(self) -> Report:
        report = Report(self.title)
        for table in self.tables:
            report.add(table.title, table_of(table.rows, table.columns, table.note))
        lines = [Text(note) for note in self.notes]
        lines += [Text(f"{item.part}: {item.what}", warning=True) for item in self.problems[1:]]
        lines += [Text(f"{self.completed}."), Text(self.verdict, warning=not self.lossless)]
        report.add("Verdict", *lines)
        return report
