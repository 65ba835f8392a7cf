"""What was measured so far, and the figures that follow from it (complete or interrupted)."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.lab.bench.runs import TimedRun


@dataclass
class Record:
    """Outcomes by (suite, contestant) and prompt; several rounds each."""

    outcomes: dict[tuple[str, str], dict[int, list[TimedRun]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, suite: str, contestant: str, prompt: int, outcome: TimedRun) -> None:
        self.outcomes[suite, contestant][prompt].append(outcome)

    def suites(self) -> list[str]:
        """In the order of measurement."""
        return list(dict.fromkeys(suite for suite, _ in self.outcomes))

    def contestants(self, suite: str) -> list[str]:
        return [name for s, name in self.outcomes if s == suite]

    def seconds(self, suite: str, contestant: str) -> dict[int, float]:
        """Median wall seconds over the rounds, by prompt."""
        runs = self.outcomes.get((suite, contestant), {})
        return {p: statistics.median(o.seconds for o in many) for p, many in runs.items()}

    def speed(self, suite: str, contestant: str) -> float | None:
        """Tokens per second over the suite: all tokens by the sum of median seconds."""
        seconds = self.seconds(suite, contestant)
        runs = self.outcomes.get((suite, contestant), {})
        if not seconds:
            return None
        return sum(runs[p][0].tokens for p in seconds) / sum(seconds.values())

    def ratio(self, suite: str, fast: str, slow: str) -> float | None:
        """How many times faster `fast` is, over the prompts that both have decoded."""
        a, b = self.seconds(suite, fast), self.seconds(suite, slow)
        common = a.keys() & b.keys()
        if not common:
            return None
        times = sum(b[p] for p in common) / sum(a[p] for p in common)
        # All write as many tokens, unless answers end by themselves and are sampled, or parted at
        # a near tie: then it is the ratio of tokens a second.
        counts = [
            sum(self.outcomes[suite, name][p][0].tokens for p in common) for name in (fast, slow)
        ]
        return times * counts[0] / counts[1]

    def drafts(self, suite: str, contestant: str) -> dict[str, float] | None:
        """Acceptance rate and tokens per target step; None where nothing was drafted."""
        runs = self.outcomes.get((suite, contestant), {})
        every = [o for many in runs.values() for o in many]
        drafted = sum(o.drafted or 0 for o in every)
        if not drafted:
            return None
        return {
            "acceptance": sum(o.accepted for o in every) / drafted,
            "mean_accepted_length": sum(o.tokens for o in every)
            / max(1, sum(o.steps for o in every)),
        }


@torch.inference_mode()
def kinship(model: Any, prompt: list[int], reference: list[int], other: list[int]) -> str:
    """ "identical", "near tie" or "different" for two greedy texts of one prompt.

    A near tie: at the first difference `model` (of transformers) gives the two tokens logits no
    more than two rounding steps of its dtype apart, so that the order of a sum decides.
    """
    if reference == other:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    if at is None:
        return "different"  # one is longer
    ids = torch.tensor([prompt + reference[:at]], device=model.device)
    logits = model(ids).logits[0, -1]
    step = torch.finfo(logits.dtype).eps * 2 ** math.floor(math.log2(float(logits.abs().max())))
    gap = abs(float(logits[reference[at]]) - float(logits[other[at]]))
    return "near tie" if gap <= 2 * step else "different"


def kinships(
    record: Record, suite: str, names: tuple[str, str], prompts: list[list[int]], model: Any
) -> dict[str, int]:
    """How many prompts of a suite two contestants decode identically."""
    first, second = (record.outcomes.get((suite, name), {}) for name in names)
    counts: Counter[str] = Counter()
    for index in sorted(first.keys() & second.keys()):
        a, b = (list(runs[index][0].answers[0].tokens) for runs in (first, second))
        counts[kinship(model, prompts[index], a, b)] += 1
    return dict(counts)
