"""What is wrong, in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.tools.certify.texts import TaskDivergence, TextCheck

if TYPE_CHECKING:
    from paceline.tools.certify.certificate import DistributionResult


@dataclass(frozen=True)
class Problem:
    """Something wrong: in which part, and what, in one line."""

    part: str
    what: str


def bug(check: TextCheck, item: TaskDivergence) -> Problem:
    """A difference that rounding does not explain."""
    found = item.difference
    where = f"{check.setting}: {item.task}: token {found.at}"
    what = f"is {item.speculative!r}, plain decoding's {item.plain!r}"
    if found.scores is None:
        return Problem(check.kind, f"BUG: {where}: one text ends where the other goes on")
    why = f"their scores are {found.gap:.3g} apart, rounding moves them by {found.step:.2g}"
    return Problem(check.kind, f"BUG: {where} {what}: {why}")


def nothing(kind: str) -> Problem:
    """Without drafts nothing is tested, and a test of nothing must not pass."""
    what = f"the drafter proposed nothing for {kind} requests, so nothing was tested"
    return Problem("coverage", f"{what}; try other prompts (--prompts)")


def rejections(results: Sequence[DistributionResult], alpha: float) -> Iterator[Problem]:
    """The distribution tests that failed, at the family's ``alpha``."""
    for result in results:
        test = result.test
        if result.adjusted >= alpha:
            continue
        odds = f"p = {result.adjusted:.1g} after correction, {test.samples} samples"
        if test.draft_length < 0:
            yield Problem("drafter", f"it does not draw from the distribution it declares ({odds})")
        elif test.draft_length == 0:
            yield Problem("plain sampling", f"{test.prefix}: {test.what} ({odds})")
        else:
            where = f"{test.prefix}, draft length {test.draft_length}"
            yield Problem("sampling", f"{where}: biased, {test.what} ({odds})")
