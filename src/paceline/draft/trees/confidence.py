"""How often paths of a drafter's probabilities are accepted, learnt; and where trees end by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.model.backends.base import GrownTree

_PRIOR = 1.0, 2.0  # refusals and hazard
_DECAY, _PRIOR_SHARE = 0.98, 0.002  # of past drafts and of the prior, at each draft


class Confidence:
    """Learns k: a path of probability p is accepted with p ** k. Each token adds its ``-log p`` to
    the path's hazard; k is refusals over hazard tried, the maximum-likelihood estimate. (SmolLM2's
    4-bit copy, greedy: 0.1; with noise on its weights: 1; its EAGLE-3 head, greedy: 2; sampled: 1.)
    """

    def __init__(self) -> None:
        self._refusals, self._hazard = _PRIOR

    @property
    def power(self) -> float:
        return self._refusals / self._hazard

    def least(self, chance: float) -> float:
        """The probability of a path that is accepted with ``chance``; 0 for 0."""
        return chance ** (1 / self.power) if chance > 0 else 0.0

    def learn(self, scores: Sequence[float], refused: bool) -> None:
        """``scores``: log-probability of the path to each tried token; the last may be refused."""
        hazards = [above - score for above, score in pairwise((0.0, *scores))]
        # Of the refused token's hazard half is counted.
        hazard = sum(hazards[:-1]) + hazards[-1] / (2 if refused else 1)
        if math.isfinite(hazard):
            self._refusals = _DECAY * self._refusals + _PRIOR_SHARE * _PRIOR[0] + refused
            self._hazard = _DECAY * self._hazard + _PRIOR_SHARE * _PRIOR[1] + hazard


class Confidences:
    """A drafter's, of greedy and of sampled requests, which learn from what is verified."""

    def __init__(self) -> None:
        self._learnt = {True: Confidence(), False: Confidence()}
        self._waiting: dict[int, tuple[Confidence, GrownTree]] = {}  # under verification

    def of(self, params: SamplingParams) -> Confidence:
        return self._learnt[params.greedy]

    def proposed(self, seq_id: int, params: SamplingParams, grown: GrownTree) -> None:
        if any(grown.scores):
            self._waiting[seq_id] = self.of(params), grown

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn how far drafts were right: by the likeliest child of each node of the text."""
        for commit in commits:
            confidence, grown = self._waiting.pop(commit.seq_id, (None, None))
            if confidence and grown and 0 < commit.reached <= len(grown.scores) == commit.drafted:
                for scores, refused in _tried(grown, commit.path, commit.reached):
                    confidence.learn(scores, refused)

    def forget(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)


def _tried(
    grown: GrownTree, path: Sequence[int], reached: int
) -> list[tuple[Sequence[float], bool]]:
    """What ``Confidence.learn`` takes, of the ``reached`` levels: a run of likeliest children that
    were accepted, up to one that was not; from a sibling that was accepted instead on, the next."""
    likeliest: dict[int, int] = {}
    for node, parent in enumerate(grown.tree.parents):
        best = likeliest.setdefault(parent, node)
        if grown.scores[node] > grown.scores[best]:
            likeliest[parent] = node
    runs: list[tuple[Sequence[float], bool]] = []
    run, start, above = list[float](), 0.0, -1
    for level in range(reached):
        if above not in likeliest:
            break
        node = likeliest[above]
        accepted = path[level] if level < len(path) else -1
        run.append(grown.scores[node] - start)
        if accepted != node:
            runs.append((run, True))
            run, start = [], grown.scores[accepted]
        above = accepted
    return [*runs, (run, False)] if run else runs
