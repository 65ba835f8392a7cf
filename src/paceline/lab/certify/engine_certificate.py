"""The certificate of an engine of this machine: what was looked at, for JSON and for tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.lab.certify.certificate import TESTS, Certificate, DistributionTest, Sheet
from paceline.lab.certify.difference import Difference
from paceline.lab.certify.evidence import TextCheck
from paceline.lab.certify.exact import ExactCheck
from paceline.lab.report.columns import Column
from paceline.lab.report.document import Block, Table

_MOST_DIVERGENCES = 12


def _class(difference: Difference) -> str:
    if difference.on_edge:
        return "tie (edge of the truncation)"
    return "tie" if difference.is_tie else "BUG"


_DIVERGENCES = Sheet(
    "divergences",
    "Where texts part, re-scored",
    (
        Column("text", "text"),
        Column("at", "token", "difference.at"),
        Column("plain", "plain", shown=repr),
        Column("speculative", "spec.", shown=repr),
        Column("plain_id", "", "difference.left"),
        Column("speculative_id", "", "difference.right"),
        Column("scores", "scores", "difference.scores", lambda s: f"{s[0]:.4g} / {s[1]:.4g}"),
        Column(  # infinite gaps are null
            *("gap", "gap", "difference.gap", "{:.3g}".format),
            lambda gap: gap if math.isfinite(gap) else None,
        ),
        Column("rounding_step", "step", "difference.step", "{:.2g}".format),
        Column("rounding_spread", "shape", "difference.spread", "{:.2g}".format),
        Column("on_edge", "", "difference.on_edge"),
        Column("", "class", "difference", _class),
    ),
    "step: the rounding step of these logits. shape: how far other batch shapes move them. A tie "
    f"is a gap of at most twice the greater move. At most {_MOST_DIVERGENCES}; all are in --json.",
)
_TEXTS = Sheet(
    "texts",
    "Token for token",
    (
        Column("kind", "requests"),
        *(Column(name, name) for name in ("setting", "texts", "tokens", "drafted", "accepted")),
        Column("ties", "ties", None, len, _DIVERGENCES.records),
        Column("bugs", "BUGS", None, len, _DIVERGENCES.records),
    ),
    "Against plain decoding one by one. After a tie the comparison goes on from plain's.",
)
_EXACT = Sheet(
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
    "Every draft and every decision of one step through the verifier in use, over the real "
    "distributions of some likely tokens. distance: total variation from the target's one of as "
    "many tokens.",
)


@dataclass(frozen=True)
class CertifySpending:
    """What the time was spent on; of how much that is wanted.

    ``seconds``: the budget of this run, None without; ``spent`` in all runs. ``looks``: verdicts
    drawn, this one among them. ``tokens`` of each text.
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

    @property
    def missing(self) -> list[str]:
        """What is still to be looked at."""
        counts = (
            (self.texts, self.texts_wanted, "texts"),
            (self.prefixes, self.prefixes_wanted, "prefixes"),
        )
        return [f"{most - had} of {most} {what}" for had, most, what in counts if had < most]

    @property
    def line(self) -> str:
        """For people."""
        parts = [f"{self.texts} of {self.texts_wanted} texts of {self.tokens} tokens"]
        if self.prefixes_wanted:
            parts.append(f"{self.prefixes} of {self.prefixes_wanted} prefixes")
            parts.append(f"{self.samples} of {self.samples_wanted} samples")
        runs = "" if self.looks == 1 else f" in {self.looks} runs"
        goes_on = ""
        if self.missing:
            goes_on = f"; not looked at: {', '.join(self.missing)}: --continue goes on"
        return f"{self.spent:.0f} s{runs} completed {', '.join(parts)}{goes_on}"


def smallest_bias(tests: Iterable[DistributionTest]) -> float:
    """Total variation from the target's distribution that would have been found at every prefix."""
    tested = [test for test in tests if test.draft_length and "distribution" in test.what]
    return max((test.smallest_bias for test in tested), default=1.0)


@dataclass(frozen=True, kw_only=True)
class EngineCertificate(Certificate):
    """Of an engine: token-for-token comparisons of ``texts``, enumerations (``exact``), and how
    much was looked at (``spending``)."""

    target: str
    draft: str
    dtype: str
    backend: str
    texts: tuple[TextCheck, ...]
    exact: tuple[ExactCheck, ...]
    spending: CertifySpending

    @property
    def complete(self) -> bool:
        """Whether all was looked at that was wanted."""
        return not self.interrupted and not self.spending.missing

    @property
    def smallest_bias(self) -> float:
        return smallest_bias(self.tests)

    def facts(self) -> dict[str, Any]:
        names = ("target", "draft", "dtype", "backend", "complete", "smallest_bias")
        budget = asdict(self.spending) | {"missing": self.spending.missing}
        return {**{name: getattr(self, name) for name in names}, "budget": budget}

    def sheets(self) -> Iterable[tuple[Sheet, Sequence[Any], Sequence[Block]]]:
        yield _TEXTS, self.texts, self._divergences()
        yield TESTS, self.tests, ()
        yield _EXACT, self.exact, ()

    def _divergences(self) -> list[Table]:
        """Bugs first; the same difference under several settings once."""
        listed = [item for check in self.texts for item in (*check.bugs, *check.ties)]
        rows = sorted(set(listed), key=lambda item: (item.difference.is_tie, item.text))
        title = _DIVERGENCES.title
        return [_DIVERGENCES.table(rows[:_MOST_DIVERGENCES], title)] if rows else []
