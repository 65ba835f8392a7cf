"""What a certification ends with: distribution tests as one family, what is wrong, the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.lab.certify.chisquare import ChiSquare, holm
from paceline.lab.report.columns import Column, record_of, table_of
from paceline.lab.report.document import Report, Text

# The least that the word CERTIFIED stands for, however little was asked for.
LEAST_TEXTS = 2  # compared in every setting
LEAST_PREFIXES = 1  # with all their samples, and the rule enumerated there
POWER = 0.9
MOST_BIAS = 0.25  # that may have gone unseen


@dataclass(frozen=True)
class ResultTable:
    """Rows as a list of JSON, under ``key`` if there is one, and as a section ``title``."""

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
        Column("draft_length", "draft", shown=lambda length: str(length or "plain")),
        Column("what", "test"),
        Column("samples", "samples"),
        Column("statistic", "chi2", "outcome.statistic", "{:.1f}".format),
        Column("degrees_of_freedom", "df", "outcome.df"),
        Column("p_value", "p", "outcome.p_value", "{:.2g}".format),
        Column("adjusted_p_value", "Holm p", shown="{:.2g}".format),
        Column("smallest_bias", "sees", shown="{:.1%}".format),
        Column("rounding", "rounding", shown="{:.2%}".format),
    ),
    "distribution: the target's, scored afresh. plain: a sample of plain decoding. Holm p: "
    "corrected for the number of tests. sees: the smallest bias (total variation) that the test "
    f"finds with power {POWER:g}. rounding: total variation between the target's distributions in "
    "two batch shapes; the test allows for twice as much.",
)


@dataclass(frozen=True)
class Problem:
    """Something wrong: in which part, and what, in one line."""

    part: str
    what: str


@dataclass(frozen=True)
class DistributionTest:
    """One test: ``what`` against what, where, and at which draft length (0 is plain decoding).

    ``part`` is at fault if it fails. ``rounding``: between batch shapes, see TESTS. Known once its
    family is: ``adjusted_p_value`` after Holm's correction, ``smallest_bias`` (total variation)
    that it finds with probability ``POWER`` at its share of the family's alpha.
    """

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


def as_family(tests: Sequence[DistributionTest], alpha: float) -> tuple[DistributionTest, ...]:
    """The tests corrected for their number (Holm 1979), each with the bias that it sees."""
    adjusted = holm([test.outcome.p_value for test in tests])
    share = alpha / max(1, len(tests))
    return tuple(
        replace(test, adjusted_p_value=p, smallest_bias=test.outcome.smallest_bias(share, POWER))
        for test, p in zip(tests, adjusted, strict=True)
    )


def too_little(texts: int, bias: float) -> list[str]:
    """Why so many compared texts, and samples that see such a ``bias``, certify nothing."""
    lacks = []
    if texts < LEAST_TEXTS:
        lacks.append(f"whole texts compared: {texts}, not {LEAST_TEXTS}")
    if bias > MOST_BIAS:
        lacks.append(f"only a bias of {bias:.0%} or more would have been seen in the samples")
    return lacks


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome. ``lossless`` only if nothing is wrong and enough was tested.

    ``facts``: what JSON says of the engine or server, and of how much was tested. ``tables``: the
    results; tests of distributions hold together at the level ``alpha``. ``lacks``: why the tests
    certify nothing. ``notes``: what was left out, and why. ``interrupted``: by Ctrl-C.
    ``completed``: what the time was spent on; ``certified``: what that word stands for here.
    """

    title: str
    alpha: float
    facts: Mapping[str, Any]
    tables: tuple[ResultTable, ...]
    problems: tuple[Problem, ...]
    lacks: tuple[str, ...]
    notes: tuple[str, ...]
    interrupted: bool
    completed: str
    certified: str

    def rows(self, key: str) -> Sequence[Any]:
        return next(table.rows for table in self.tables if table.key == key)

    @property
    def enough(self) -> bool:
        """Whether what was tested can certify anything."""
        return not self.interrupted and not self.lacks

    @property
    def lossless(self) -> bool:
        return self.enough and not self.problems

    @property
    def verdict(self) -> str:
        nothing = "nothing is wrong in what was tested"
        if self.problems:
            first, *others = self.problems
            more = f" (and {len(others)} more)" if others else ""
            return f"NOT LOSSLESS: {first.part}: {first.what}{more}"
        if self.interrupted:
            return f"NOT CERTIFIED: interrupted; {nothing}"
        if self.lacks:
            return f"NOT ENOUGH: {'; '.join(self.lacks)}. {self.completed}; {nothing}"
        return f"CERTIFIED: {self.certified}"

    def record(self) -> dict[str, Any]:
        tables = [table for table in self.tables if table.key]
        return {
            "lossless": self.lossless,
            "verdict": self.verdict,
            "enough": self.enough,
            "interrupted": self.interrupted,
            "alpha": self.alpha,
            "power": POWER,
            **self.facts,
            "problems": [asdict(problem) for problem in self.problems],
            "lacks": self.lacks,
            "notes": self.notes,
            **{table.key: [record_of(r, table.columns) for r in table.rows] for table in tables},
        }

    def report(self) -> Report:
        report = Report(self.title)
        for table in self.tables:
            if table.rows:
                report.add(table.title, table_of(table.rows, table.columns, table.note))
        lines = [Text(note) for note in self.notes]
        lines += [Text(f"{item.part}: {item.what}", warning=True) for item in self.problems[1:]]
        lines += [Text(f"{self.completed}."), Text(self.verdict, warning=not self.lossless)]
        report.add("Verdict", *lines)
        return report
