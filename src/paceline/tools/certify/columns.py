"""What a certificate says of each thing that was looked at: once, for JSON and for tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.difference import Difference
from paceline.tools.certify.exact import ExactCheck
from paceline.tools.report.columns import Column, record_of


def _length(length: int) -> str:
    return {-1: "", 0: "plain"}.get(length, str(length))


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


def _scores(scores: tuple[float, float] | None) -> str:
    return "" if scores is None else f"{scores[0]:.4g} / {scores[1]:.4g}"


def _vocabulary(check: ExactCheck) -> str:
    return f"all {check.vocabulary}" if check.whole else f"{check.vocabulary} likeliest"


def _class(found: Difference) -> str:
    if found.on_edge:
        return "tie (edge of the truncation)"
    return "tie" if found.is_tie else "BUG"


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
