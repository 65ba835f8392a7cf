"""A certificate for people: tables, and what the first tokens look like in a picture."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.tools.certify.certificate import POWER, Certificate, DistributionResult
from paceline.tools.certify.sampled import Frequencies
from paceline.tools.certify.texts import TaskDivergence, TextCheck
from paceline.tools.report.document import Block, Figure, Report, Table, Text
from paceline.tools.report.plots import bands

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
        report.add("The rule, enumerated", _exact(certificate))
    lines: list[Block] = [Text(note) for note in certificate.notes]
    more = certificate.problems[1:]
    lines += [Text(f"{item.part}: {item.what}", warning=True) for item in more]
    lines += [Text(line) for line in _bought(certificate)]
    lines.append(Text(certificate.verdict, warning=not certificate.lossless))
    report.add("Verdict", *lines)
    return report


def _bought(certificate: Certificate) -> list[str]:
    """What the time was spent on, and how to see more."""
    bought = certificate.bought
    line = f"{bought.line}."
    if certificate.distributions:
        line += f" The smallest bias that it could have seen is {certificate.smallest_bias:.1%}."
    if bought.missing:
        line += f" Not looked at: {', '.join(bought.missing)}. --continue goes on."
    return [line]


def _texts(certificate: Certificate) -> list[Block]:
    rows = [
        (
            check.kind,
            check.setting,
            check.texts,
            check.tokens,
            check.drafted,
            check.accepted,
            len(check.ties),
            len(check.bugs),
        )
        for check in certificate.texts
    ]
    table = Table(
        ("requests", "setting", "texts", "tokens", "drafted", "accepted", "ties", "BUGS"),
        rows,
        note="Against plain decoding one by one. After a tie the comparison goes on from plain's.",
    )
    found = _distinct(certificate.texts)
    blocks: list[Block] = [table]
    if found:
        left = len(found) - _MOST_PARTINGS
        note = f"in {certificate.dtype}; a tie is a gap of at most twice the greater move"
        blocks.append(
            Table(
                ("text", "token", "plain", "spec.", "scores", "gap", "step", "shape", "class"),
                [_parting(item) for item in found[:_MOST_PARTINGS]],
                title="Where texts part, re-scored",
                note="step: the rounding step of these logits. shape: how far other batch shapes "
                f"move them. All {note}" + (f"; {left} more in --json." if left > 0 else "."),
            )
        )
    return blocks


def _distinct(checks: tuple[TextCheck, ...]) -> list[TaskDivergence]:
    """Bugs first; the same difference under several settings once."""
    every = [item for check in checks for item in check.bugs]
    every += [item for check in checks for item in check.ties]
    known = {
        (item.task, item.difference.at, item.difference.left, item.difference.right): item
        for item in reversed(every)
    }
    return sorted(known.values(), key=lambda item: (item.difference.is_tie, item.task))


def _parting(item: TaskDivergence) -> tuple[str | int, ...]:
    found = item.difference
    scores = "" if found.scores is None else f"{found.scores[0]:.4g} / {found.scores[1]:.4g}"
    kind = "tie" if found.is_tie else "BUG"
    if found.on_edge:
        kind = "tie (edge of the truncation)"
    return (
        item.task,
        found.at,
        repr(item.plain),
        repr(item.speculative),
        scores,
        f"{found.gap:.3g}",
        f"{found.step:.2g}",
        f"{found.spread:.2g}",
        kind,
    )


def _distributions(certificate: Certificate) -> Table:
    return Table(
        ("prefix", "draft", "test", "samples", "cells", "chi2", "p", "Holm p", "sees", "rounding"),
        [_distribution(result) for result in certificate.distributions],
        note="distribution: the target's, scored afresh; plain: a sample of plain decoding. "
        f"Family-wise alpha {certificate.alpha:g}. sees: the smallest bias (total variation "
        f"over the cells) that this test finds with power {POWER:g}. rounding: total variation "
        "between the target's distributions in two batch shapes; the test allows for twice as "
        "much.",
    )


def _distribution(result: DistributionResult) -> tuple[str | int, ...]:
    test = result.test
    draft = "plain" if test.draft_length == 0 else str(test.draft_length)
    return (
        test.prefix,
        "" if test.draft_length < 0 else draft,
        test.what,
        test.samples,
        test.cells,
        f"{test.outcome.statistic:.1f}",
        f"{test.outcome.p_value:.2g}",
        f"{result.adjusted:.2g}",
        f"{result.smallest_bias:.1%}",
        f"{test.rounding:.2%}",
    )


def _exact(certificate: Certificate) -> Table:
    rows = [
        (
            check.prefix,
            f"{check.nodes} nodes, {check.draw.replace('_', ' ')}",
            check.tokens,
            f"all {check.vocabulary}" if check.whole else f"{check.vocabulary} likeliest",
            check.outcomes,
            f"{check.distance:.1e}",
        )
        for check in certificate.exact
    ]
    return Table(
        ("prefix", "draft", "tokens", "vocabulary", "outcomes", "distance"),
        rows,
        note="Every draft and every decision of one step through the verifier in use, over the "
        "real distributions. distance: total variation from the target's one of as many tokens.",
    )


def _figure(item: Frequencies, spell: Callable[[int], str]) -> Figure:
    errors = [_BAND * math.sqrt(p * (1 - p) / item.samples) for p in item.expected]
    places = range(len(item.expected))

    def draw() -> str:
        return bands(
            [repr(spell(token)) for token in item.tokens],
            item.expected,
            [max(0.0, item.expected[i] - errors[i]) for i in places],
            [item.expected[i] + errors[i] for i in places],
            item.observed,
            "share of first tokens",
        )

    title = f"{item.prefix}: first tokens of {item.samples} samples, 99.9 % bands"
    return Figure(title, draw, "first-" + "".join(c if c.isalnum() else "-" for c in item.prefix))
