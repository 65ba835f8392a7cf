"""How a tuning divides its time: fewer prompts for everybody rather than half a measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.costs import TargetCosts
from paceline.lab.budget import Budget
from paceline.lab.tune.measure import LONGEST, Sample

TARGET_SHARE = 0.2  # of what is left, for forwards of the target alone
CANDIDATE_SHARE = 0.65  # of what is left then, for the drafters
_AROUND = 1.7  # short drafts, warm-ups and plain steps beside those of the sample
_SLOWER = 1.15  # whole steps than the target's forwards in them
_SIZES = (8, 4, 2, 1)  # prompts of a round of the confirmation
FEW = 3  # finalists at least: plain decoding, and the best drafter at both lengths
MOST_SHARE = 1 / 3  # of the drafters' time, for any one of them
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class TuneOptions:
    """What the user tunes for. ``source`` names the prompts."""

    concurrency: int = 1
    temperature: float = 0.0
    max_tokens: int = 48
    rounds: int = 4
    source: str = "shipped prompts"


@dataclass(frozen=True)
class TuneSpending:
    """What the time was spent on. ``not_tried``: drafters that were not measured, by label."""

    seconds: float | None
    spent: float
    candidates: int
    candidates_wanted: int
    rounds: int
    rounds_wanted: int
    prompts_a_round: int
    not_tried: tuple[str, ...]

    @property
    def line(self) -> str:
        rounds = f"{self.rounds} of {self.rounds_wanted} rounds of {self.prompts_a_round} prompts"
        line = (
            f"{self.spent:.0f} s completed {self.candidates} of {self.candidates_wanted} "
            f"drafters and {rounds}."
        )
        if self.not_tried:
            line += f" Not tried: {', '.join(self.not_tried)}."
        if self.not_tried or self.rounds < self.rounds_wanted:
            line += " --continue goes on."
        return line


def fitting_sample(sample: Sample, target: TargetCosts, budget: Budget, candidates: int) -> Sample:
    """As many prompts as let all candidates be measured in their share of the budget.

    Where that is very little, nothing is decoded together: figures for many sequences are then
    continued from those for one.
    """
    if budget.seconds is None:
        return sample
    limit = max(0.0, budget.left) * CANDIDATE_SHARE / max(1, candidates + 1)  # plain decoding, too
    wide = sample.wide
    for alone, together in ((4, 2 * wide), (4, wide), (2, wide), (2, 0), (1, 0)):
        smaller = replace(sample, alone=sample.alone[:alone], together=sample.together[:together])
        # Long drafts that are seldom accepted.
        waves = -(-together // wide)
        steps = alone * target(1, 1 + LONGEST) + waves * target(wide, 1 + LONGEST)
        if _AROUND * sample.max_tokens * steps <= limit:
            break
    return smaller


def affordable(
    finalists: int, target: TargetCosts, options: TuneOptions, budget: Budget, few: int = FEW
) -> tuple[int, int]:
    """How many finalists are confirmed, ``few`` at least, and on how many prompts a round, so that
    two rounds fit at least."""
    concurrency = options.concurrency
    largest = max(_SIZES[0], concurrency)
    if budget.seconds is None:
        return finalists, largest
    sizes = [size for size in (largest, *_SIZES[1:]) if size >= concurrency]
    for many in dict.fromkeys((finalists, min(finalists, few))):
        for size in sizes:
            steps = -(-size // concurrency) * options.max_tokens
            round_ = many * steps * target(concurrency, 1) * _SLOWER
            if round_ * min(LEAST_ROUNDS, options.rounds) <= budget.left:
                return many, size
    return min(finalists, few), sizes[-1]
