"""What a certification found, as plain data, and what it says of each thing that was looked at:
once, for JSON and for tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.lab.certify.chisquare import holm
from paceline.lab.certify.evidence import Problem, TextCheck
from paceline.lab.certify.exact import ExactCheck
from paceline.lab.certify.sampled import DistributionTest, Frequencies
from paceline.lab.difference import Difference
from paceline.lab.report.columns import Column, record_of
from paceline.model.backends.base import NATIVE


def _length(length: int) -> str:
    return {-1: "", 0: "plain"}.get(length, str(length))


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


def _scores(scores: tuple[float, float] | None) -> str:
    return "" if scores is None else f"{scores[0]:.4g} / {scores[1]:.4g}"


def _vocabulary(check: ExactCheck) -> str:
    return f"all {check.vocabulary}" if check.whole else f"{check.vocabulary} likeliest"


def _class(difference: Difference) -> str:
    if difference.on_edge:
        return "tie (edge of the truncation)"
    return "tie" if difference.is_tie else "BUG"


PARTING_COLUMNS = (
    Column("task", "text", "task"),
    Column("at", "token", "difference.at"),
    Column("plain", "plain", "plain", repr),
    Column("speculative", "spec.", "speculative", repr),
    Column("plain_id", "", "difference.left"),
    Column("speculative_id", "", "difference.right"),
    Column("scores", "scores", "difference.scores", _scores),
    Column("gap", "gap", "difference.gap", "{:.3g}".format, _finite),
    Column("rounding_step", "step", "difference.step", "{:.2g}".format),
    Column("rounding_spread", "shape", "difference.spread", "{:.2g}".format),
    Column("on_edge", "", "difference.on_edge"),
    Column("", "class", "difference", _class),
)


def _partings(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [record_of(item, PARTING_COLUMNS) for item in items]


TEXT_COLUMNS = (
    Column("kind", "requests", "kind"),
    *(Column(name, name, name) for name in ("setting", "texts", "tokens", "drafted", "accepted")),
    Column("ties", "ties", "ties", len, _partings),
    Column("bugs", "BUGS", "bugs", len, _partings),
)

DISTRIBUTION_COLUMNS = (
    Column("prefix", "prefix", "test.prefix"),
    Column("draft_length", "draft", "test.draft_length", _length),
    Column("what", "test", "test.what"),
    Column("samples", "samples", "test.samples"),
    Column("cells", "cells", "test.cells"),
    Column("statistic", "chi2", "test.outcome.statistic", "{:.1f}".format),
    Column("degrees_of_freedom", "", "test.outcome.df"),
    Column("p_value", "p", "test.outcome.p_value", "{:.2g}".format),
    Column("adjusted_p_value", "Holm p", "adjusted", "{:.2g}".format),
    Column("smallest_bias", "sees", "smallest_bias", "{:.1%}".format),
    Column("rounding", "rounding", "test.rounding", "{:.2%}".format),
)

EXACT_COLUMNS = (
    Column("", "prefix", "prefix"),
    Column("", "draft", "", lambda c: f"{c.nodes} nodes, {c.draw.replace('_', ' ')}"),
    Column("", "tokens", "tokens"),
    Column("", "vocabulary", "", _vocabulary),
    Column("", "outcomes", "outcomes"),
    Column("", "distance", "distance", "{:.1e}".format),
)


# The least that the word CERTIFIED stands for, however little was asked for.
LEAST_TEXTS = 2  # compared in every setting
LEAST_PREFIXES = 1  # with all their samples, and the rule enumerated there
POWER = 0.9
MOST_BIAS = 0.25  # that may have gone unseen


@dataclass(frozen=True)
class CertifySpending:
    """What the time was spent on; of how much that is wanted.

    ``seconds``: the budget of this run, None without; ``spent`` in all runs. ``looks``: verdicts
    drawn, this one among them. ``tokens`` of each text. ``missing``: what is still to be looked
    at. ``lacks``: why that little certifies nothing; empty if it is enough.
    """

    seconds: float | None
    spent: float
    tokens: int
    texts: int
    texts_wanted: int
    prefixes: int
    prefixes_wanted: int
    samples: int
    samples_wanted: int
    looks: int
    missing: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For people."""
        parts = [f"{self.texts} of {self.texts_wanted} texts of {self.tokens} tokens"]
        if self.prefixes_wanted:
            parts.append(f"{self.prefixes} of {self.prefixes_wanted} prefixes")
            parts.append(f"{self.samples} of {self.samples_wanted} samples")
        runs = "" if self.looks == 1 else f" in {self.looks} runs"
        return f"{self.spent:.0f} s{runs} completed {', '.join(parts)}"


@dataclass(frozen=True)
class DistributionResult:
    """A distribution test among its family.

    ``adjusted``: p-value after Holm's correction. ``smallest_bias``: total variation over the
    cells that the test finds with probability ``POWER``, at its share of the family's alpha.
    """

    test: DistributionTest
    adjusted: float
    smallest_bias: float

    @classmethod
    def of(cls, tests: Sequence[DistributionTest], alpha: float) -> tuple[DistributionResult, ...]:
        """The tests as one family (Holm 1979), each with what it could have found."""
        adjusted = holm([test.outcome.p_value for test in tests])
        share = alpha / max(1, len(tests))
        return tuple(
            cls(test, value, test.outcome.smallest_bias(share, POWER))
            for test, value in zip(tests, adjusted, strict=True)
        )

    def problem(self) -> Problem:
        """What it means that the test failed."""
        test = self.test
        odds = f"p = {self.adjusted:.1g} after correction, {test.samples} samples"
        if test.draft_length < 0:
            what = f"it does not draw from the distribution it declares ({odds})"
            return Problem("drafter", what)
        if test.draft_length == 0:
            return Problem("plain sampling", f"{test.prefix}: {test.what} ({odds})")
        where = f"{test.prefix}, draft length {test.draft_length}"
        return Problem("sampling", f"{where}: biased, {test.what} ({odds})")


def smallest_bias(results: Iterable[DistributionResult]) -> float:
    """Total variation from the target's distribution that would have been found at every prefix."""
    tested = [r for r in results if r.test.draft_length > 0 and "distribution" in r.test.what]
    return max((result.smallest_bias for result in tested), default=1.0)


@dataclass(frozen=True)
class Certificate:
    """The outcome. ``lossless`` only if enough was looked at and nothing is wrong: never less than
    ``LEAST_TEXTS``, ``LEAST_PREFIXES`` (where anything is sampled) and what sees ``MOST_BIAS``.

    ``texts``: token-for-token comparisons. ``distributions``: tests of them, together at the level
    ``alpha``. ``exact``: enumerations. ``notes``: what was left out, and why. ``interrupted``: by
    Ctrl-C. ``completed``: how much was looked at.
    """

    target: str
    draft: str
    dtype: str
    backend: str
    alpha: float
    texts: tuple[TextCheck, ...]
    distributions: tuple[DistributionResult, ...]
    exact: tuple[ExactCheck, ...]
    frequencies: tuple[Frequencies, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    interrupted: bool
    completed: CertifySpending

    @property
    def complete(self) -> bool:
        """Whether all was looked at that was wanted."""
        return not self.interrupted and not self.completed.missing

    @property
    def enough(self) -> bool:
        """Whether what was looked at can certify anything."""
        return not self.interrupted and not self.completed.lacks

    @property
    def lossless(self) -> bool:
        return self.enough and not self.problems

    @property
    def ties(self) -> int:
        return sum(len(check.ties) for check in self.texts)

    @property
    def smallest_bias(self) -> float:
        return smallest_bias(self.distributions)

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.problems:
            first, more = self.problems[0], len(self.problems) - 1
            others = f" (and {more} more)" if more else ""
            return f"NOT LOSSLESS: {first.part}: {first.what}{others}"
        if self.interrupted:
            return "NOT CERTIFIED: interrupted; nothing was found in what was looked at"
        if not self.enough:
            lacks = "; ".join(self.completed.lacks)
            nothing = "nothing was found in what was looked at"
            return f"NOT ENOUGH: {lacks}. {self.completed.line}; {nothing}"
        parts = []
        if self.texts:
            tokens = sum(check.tokens for check in self.texts)
            parts.append(f"{tokens} tokens equal to plain decoding's {self._how_equal}")
        if self.distributions:
            bias = f"{self.smallest_bias:.1%}"
            parts.append(
                f"no bias in {len(self.distributions)} distribution tests, which see {bias} or more"
            )
        if not self.completed.prefixes_wanted:
            parts.append("greedy decoding only, no samples were drawn")
        if self.exact:
            worst = max(check.distance for check in self.exact)
            parts.append(f"the rule is exact to {worst:.0e}")
        return "CERTIFIED: " + "; ".join(parts)

    @property
    def _how_equal(self) -> str:
        if not self.ties and self.backend.startswith(NATIVE):
            return f"bit for bit on {self.backend}"
        ties = f"{self.ties} near tie{'' if self.ties == 1 else 's'}"
        return f"but for {ties} on {self.backend}"

    def record(self) -> dict[str, Any]:
        """As JSON knows it; infinite gaps are null."""
        judged = ("lossless", "verdict", "complete", "interrupted", "enough", "smallest_bias")
        about = ("target", "draft", "dtype", "backend", "alpha")
        return {
            **{name: getattr(self, name) for name in (*judged, *about)},
            "budget": asdict(self.completed),
            "power": POWER,
            "problems": [asdict(problem) for problem in self.problems],
            "texts": [record_of(check, TEXT_COLUMNS) for check in self.texts],
            "laws": [record_of(result, DISTRIBUTION_COLUMNS) for result in self.distributions],
            "exact": [{**asdict(check), "passed": check.passed} for check in self.exact],
            "notes": list(self.notes),
        }
