"""A certificate for people: tables, and what the first tokens look like in a picture."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.lab.certify.certificate import (
    DISTRIBUTION_COLUMNS,
    EXACT_COLUMNS,
    PARTING_COLUMNS,
    POWER,
    TEXT_COLUMNS,
    Certificate,
)
from paceline.lab.certify.evidence import TaskDivergence, TextCheck
from paceline.lab.certify.sampled import Frequencies
from paceline.lab.report.columns import table_of
from paceline.lab.report.document import Block, Figure, Report, Table, Text
from paceline.lab.report.plots import bands

_MOST_PARTINGS = 12
_BAND = 3.29  # standard errors on either side: 99.9 %


def report_of(certificate: Certificate, spell: Callable[[int], str]) -> Report:
    """``spell`` gives the text of a token id."""
    report = Report(f"Is {certificate.draft} on {certificate.target} lossless?")
    if certificate.texts:
        report.add("Token for token", *_texts(certificate))
    if certificate.distributions:
        figures = [_figure(item, spell) for item in certificate.frequencies if item.tokens]
        report.add("Distribution of sampled text", _distributions(certificate), *figures)
    if certificate.exact:
        note = (
            "Every draft and every decision of one step through the verifier in use, over the "
            "real distributions. distance: total variation from the target's one of as many tokens."
        )
        report.add("The rule, enumerated", table_of(certificate.exact, EXACT_COLUMNS, note))
    lines: list[Block] = [Text(note) for note in certificate.notes]
    more = certificate.problems[1:]
    lines += [Text(f"{item.part}: {item.what}", warning=True) for item in more]
    lines.append(Text(_completed(certificate)))
    lines.append(Text(certificate.verdict, warning=not certificate.lossless))
    report.add("Verdict", *lines)
    return report


def _completed(certificate: Certificate) -> str:
    """What the time was spent on, and how to see more."""
    completed = certificate.completed
    line = f"{completed.line}."
    if certificate.distributions:
        line += f" The smallest bias that it could have seen is {certificate.smallest_bias:.1%}."
    if completed.missing:
        line += f" Not looked at: {', '.join(completed.missing)}. --continue goes on."
    return line


def _texts(certificate: Certificate) -> list[Table]:
    note = "Against plain decoding one by one. After a tie the comparison goes on from plain's."
    tables = [table_of(certificate.texts, TEXT_COLUMNS, note)]
    distinct = _distinct(certificate.texts)
    if distinct:
        left = len(distinct) - _MOST_PARTINGS
        note = (
            "step: the rounding step of these logits. shape: how far other batch shapes move them. "
            f"All in {certificate.dtype}; a tie is a gap of at most twice the greater move"
        )
        note += f"; {left} more in --json." if left > 0 else "."
        shown, title = distinct[:_MOST_PARTINGS], "Where texts part, re-scored"
        tables.append(table_of(shown, PARTING_COLUMNS, note, title))
    return tables


def _distinct(checks: tuple[TextCheck, ...]) -> list[TaskDivergence]:
    """Bugs first; the same difference under several settings once."""
    every = [item for check in checks for item in check.bugs]
    every += [item for check in checks for item in check.ties]
    known = {
        (item.task, item.difference.at, item.difference.left, item.difference.right): item
        for item in reversed(every)
    }
    return sorted(known.values(), key=lambda item: (item.difference.is_tie, item.task))


def _distributions(certificate: Certificate) -> Table:
    note = (
        "distribution: the target's, scored afresh; plain: a sample of plain decoding. "
        f"Family-wise alpha {certificate.alpha:g}. sees: the smallest bias (total variation "
        f"over the cells) that this test finds with power {POWER:g}. rounding: total variation "
        "between the target's distributions in two batch shapes; the test allows for twice as "
        "much."
    )
    return table_of(certificate.distributions, DISTRIBUTION_COLUMNS, note)


def _figure(item: Frequencies, spell: Callable[[int], str]) -> Figure:
    errors = [_BAND * math.sqrt(p * (1 - p) / item.samples) for p in item.expected]
    pairs = list(zip(item.expected, errors, strict=True))

    def draw() -> str:
        return bands(
            [repr(spell(token)) for token in item.tokens],
            item.expected,
            [max(0.0, share - error) for share, error in pairs],
            [share + error for share, error in pairs],
            item.observed,
            "share of first tokens",
        )

    title = f"{item.prefix}: first tokens of {item.samples} samples, 99.9 % bands"
    return Figure(title, draw, "first-" + "".join(c if c.isalnum() else "-" for c in item.prefix))
