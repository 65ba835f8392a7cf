"""The evidence of a certification, and the certificate: verdict, tables, JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.lab.certify.chisquare import ChiSquare, holm
from paceline.lab.certify.decoding import Difference, Start, TokenIds
from paceline.lab.certify.draws import DraftRecorder, Examples
from paceline.lab.certify.exact import ExactCheck
from paceline.lab.report.document import NOTES, Column, Report, Text, record_of, table_of

# The minimum of evidence for the verdict CERTIFIED, whatever the effort settings ask for.
MIN_TEXTS = 2  # compared in every setting
MIN_PREFIXES = 1  # with all their samples, and the rule enumerated there
MAX_BIAS = 0.25  # a larger bias must have been detectable
POWER = 0.9  # probability with which a test detects its smallest bias
_MAX_DIVERGENCES = 12  # in a report
_NOTES = NOTES["certify"]


@dataclass(frozen=True)
class ResultTable:
    """Results of one kind: a section of the report and, with a ``key``, a list in JSON."""

    key: str
    title: str
    columns: Sequence[Column]
    note: str = ""
    rows: Sequence[Any] = ()


TESTS = ResultTable(
    "tests",
    "Distribution of sampled text",
    (
        Column("prefix", "prefix"),
        Column("draft_length", "draft"),
        Column("what", "test"),
        Column("samples", "samples"),
        Column("statistic", "chi2", "outcome.statistic", "{:.1f}".format),
        Column("degrees_of_freedom", "df", "outcome.df"),
        Column("p_value", "p", "outcome.p_value", "{:.2g}".format),
        Column("adjusted_p_value", "Holm p", shown="{:.2g}".format),
        Column("smallest_bias", "detects", shown="{:.1%}".format),
        Column("rounding", "rounding", shown="{:.2%}".format),
    ),
    _NOTES["tests"].format(POWER),
)


@dataclass(frozen=True)
class Problem:
    """Something wrong: the part of the certification, and a one-line description."""

    part: str
    what: str


@dataclass(frozen=True)
class DistributionTest:
    """A chi-square test. ``what`` names the two distributions compared; if it fails, the problem is
    one of ``part``. ``rounding``: total variation between two batch shapes of the target.
    ``adjusted_p_value``: after Holm's correction; ``smallest_bias``: the total variation distance
    that the test detects with probability ``POWER``. Both are set by ``with_holm_correction``."""

    part: str
    what: str
    samples: int
    outcome: ChiSquare
    prefix: str = ""
    draft_length: int | None = None
    rounding: float = 0.0
    adjusted_p_value: float = 1.0
    smallest_bias: float = 1.0

    def problem(self) -> Problem:
        length = f"draft length {self.draft_length}" if self.draft_length else ""
        where = ", ".join(filter(None, (self.prefix, length, f"biased, {self.what}")))
        odds = f"p = {self.adjusted_p_value:.1g} after correction, {self.samples} samples"
        return Problem(self.part, f"{where} ({odds})")


def with_holm_correction(
    tests: Sequence[DistributionTest], alpha: float
) -> tuple[DistributionTest, ...]:
    """The tests with p-values corrected for multiple testing (Holm 1979) and the smallest bias that
    each detects at the family-wise level ``alpha``."""
    adjusted = holm([test.outcome.p_value for test in tests])
    share = alpha / max(1, len(tests))
    return tuple(
        replace(test, adjusted_p_value=p, smallest_bias=test.outcome.smallest_bias(share, POWER))
        for test, p in zip(tests, adjusted, strict=True)
    )


def missing_evidence(texts: int, bias: float) -> list[str]:
    """Why the evidence is not enough, if it is not: ``texts`` compared in every setting, and tests
    whose smallest detectable bias is ``bias``."""
    lacks = []
    if texts < MIN_TEXTS:
        lacks.append(f"whole texts compared: {texts}, not {MIN_TEXTS}")
    if bias > MAX_BIAS:
        lacks.append(f"only a bias of {bias:.0%} or more would have been detected in the samples")
    return lacks


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome. ``lossless`` only if there are no problems and enough was tested.

    ``facts``: further entries of the JSON. ``tables``: the results. ``alpha``: family-wise error
    rate of the distribution tests. ``missing_evidence``: what a certificate lacks.
    ``notes``: what was left out, and why. ``completed``: a line on what was done in which time;
    ``certified``: what the verdict CERTIFIED says in this case."""

    title: str
    alpha: float
    facts: Mapping[str, Any]
    tables: tuple[ResultTable, ...]
    problems: tuple[Problem, ...]
    missing_evidence: tuple[str, ...]
    notes: tuple[str, ...]
    interrupted: bool
    completed: str
    certified: str

    def rows(self, key: str) -> Sequence[Any]:
        return next(table.rows for table in self.tables if table.key == key)

    @property
    def enough(self) -> bool:
        """Whether what was tested can certify anything."""
        return not self.interrupted and not self.missing_evidence

    @property
    def lossless(self) -> bool:
        return self.enough and not self.problems

    @property
    def verdict(self) -> str:
        so_far = "no problem in what was tested"
        if self.problems:
            first, *others = self.problems
            more = f" (and {len(others)} more)" if others else ""
            return f"NOT LOSSLESS: {first.part}: {first.what}{more}"
        if self.interrupted:
            return f"NOT CERTIFIED: interrupted; {so_far}"
        if self.missing_evidence:
            return f"NOT ENOUGH: {'; '.join(self.missing_evidence)}. {self.completed}; {so_far}"
        return f"CERTIFIED: {self.certified}"

    def record(self) -> dict[str, Any]:
        tables = [table for table in self.tables if table.key]
        outcome, rest = ("lossless", "verdict", "enough", "interrupted"), ("alpha", "notes")
        return {
            **{name: getattr(self, name) for name in (*outcome, "missing_evidence", *rest)},
            "power": POWER,
            **self.facts,
            "problems": [asdict(problem) for problem in self.problems],
            **{table.key: [record_of(r, table.columns) for r in table.rows] for table in tables},
        }

    def report(self) -> Report:
        report = Report(self.title)
        for table in self.tables:
            report.add(table.title, table_of(table.rows, table.columns, table.note))
        lines = [Text(note) for note in self.notes]
        lines += [Text(f"{item.part}: {item.what}", warning=True) for item in self.problems[1:]]
        if self.completed not in self.verdict:
            lines.append(Text(f"{self.completed}."))
        lines.append(Text(self.verdict, warning=not self.lossless))
        report.add("Verdict", *lines)
        return report


@dataclass(frozen=True, kw_only=True)
class TextDivergence(Difference):
    """Where a text differs from the plain one, re-scored; with both tokens as text. ``is_bug``:
    rounding does not explain it."""

    text: str
    plain: str
    speculative: str
    is_bug: bool


@dataclass(frozen=True)
class TextCheck:
    """Texts of a kind compared with plain decoding under one setting."""

    kind: str  # "greedy" or "seeded"
    setting: str
    texts: int
    tokens: int
    drafted: int
    accepted: int
    divergences: tuple[TextDivergence, ...]

    @property
    def ties(self) -> list[TextDivergence]:
        return [item for item in self.divergences if not item.is_bug]

    @property
    def bugs(self) -> list[TextDivergence]:
        return [item for item in self.divergences if item.is_bug]

    def __add__(self, other: TextCheck) -> TextCheck:
        sums = {k: v + getattr(other, k) for k, v in vars(self).items()}
        return replace(self, **sums | {"kind": self.kind, "setting": self.setting})

    def problem(self, bug: TextDivergence) -> Problem:
        where = f"BUG: {self.setting}: {bug.text}: token {bug.at}"
        if bug.scores is None:
            return Problem(self.kind, f"{where}: one text ends where the other continues")
        what = f"is {bug.speculative!r}, with plain decoding {bug.plain!r}"
        why = f"differ by {bug.gap:.3g}, the rounding step is {bug.step:.2g}"
        return Problem(self.kind, f"{where} {what}: their scores {why}")


@dataclass
class Prefix:
    """A point at which continuations are sampled. ``drawn``: the samples, decoded with drafts of
    ``draft_length``; ``drafted``: tokens drafted for them; ``examples`` of these drafts, and the
    ``exact`` checks of the rule with them."""

    start: Start
    draft_length: int
    drawn: list[TokenIds] = field(default_factory=list)
    drafted: int = 0
    examples: Examples = field(default_factory=dict)
    exact: list[ExactCheck] = field(default_factory=list)


@dataclass
class Evidence:
    """All results so far. ``draws``: tokens sampled by the drafter. ``tokens``: length of each
    text, 0 until chosen. ``plain``: plain decoding's texts by kind and number. ``compared``: in how
    many comparisons a text was."""

    draws: DraftRecorder
    tokens: int = 0
    plain: dict[tuple[str, int], TokenIds] = field(default_factory=dict)
    compared: Counter[int] = field(default_factory=Counter)
    checks: dict[tuple[str, str], TextCheck] = field(default_factory=dict)  # by kind and setting
    prefixes: list[Prefix] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def exact(self) -> list[ExactCheck]:
        return [check for prefix in self.prefixes for check in prefix.exact]

    def add(self, check: TextCheck) -> None:
        """Add a check to the earlier ones of the same kind and setting."""
        self.problems += map(check.problem, check.bugs)
        key = check.kind, check.setting
        self.checks[key] = self.checks[key] + check if key in self.checks else check

    def tables(self, tests: Sequence[DistributionTest]) -> Iterator[ResultTable]:
        """All tables, with these ``tests``. A divergence under several settings is listed once."""
        checks = tuple(self.checks.values())
        yield replace(_TEXTS, rows=checks)
        listed = {item for check in checks for item in check.divergences}
        rows = sorted(listed, key=lambda item: (not item.is_bug, item.text))
        yield replace(_DIVERGENCES, rows=rows[:_MAX_DIVERGENCES])
        yield replace(TESTS, rows=tests)
        yield replace(_EXACT, rows=self.exact)


def _classification(item: TextDivergence) -> str:
    return "BUG" if item.is_bug else "tie (edge of the truncation)" if item.on_edge else "tie"


_DIVERGENCES = ResultTable(
    "",
    "Where texts differ, re-scored",
    (
        Column("text", "text"),
        Column("at", "token"),
        Column("plain", "plain", shown=repr),
        Column("speculative", "spec.", shown=repr),
        Column("plain_id", "", "left"),
        Column("speculative_id", "", "right"),
        Column("scores", "scores", shown=lambda s: f"{s[0]:.4g} / {s[1]:.4g}"),
        Column("gap", "gap", None, "{:.3g}".format, lambda gap: gap if gap < math.inf else None),
        Column("rounding_step", "step", "step", "{:.2g}".format),
        Column("rounding_spread", "shape", "spread", "{:.2g}".format),
        Column("on_edge"),
        Column("", "class", "", _classification),
    ),
    _NOTES["divergences"].format(_MAX_DIVERGENCES),
)


def _records(items: Sequence[TextDivergence]) -> list[object]:
    return [record_of(item, _DIVERGENCES.columns) for item in items]


_TEXTS = ResultTable(
    "texts",
    "Token for token",
    (
        Column("kind", "requests"),
        *(Column(name, name) for name in ("setting", "texts", "tokens", "drafted", "accepted")),
        Column("ties", "ties", None, len, _records),
        Column("bugs", "BUGS", None, len, _records),
    ),
    _NOTES["texts"],
)
_EXACT = ResultTable(
    "exact",
    "The rule, enumerated",
    (
        Column("prefix", "prefix"),
        Column("", "draft", "", lambda c: f"{c.nodes} nodes, {c.draw.replace('_', ' ')}"),
        Column("draw"),
        Column("nodes"),
        Column("tokens", "tokens"),
        Column("vocabulary", "vocabulary"),
        Column("whole", "all of it"),
        Column("outcomes", "outcomes"),
        Column("distance", "distance", shown="{:.1e}".format),
        Column("passed"),
    ),
    _NOTES["exact"],
)
