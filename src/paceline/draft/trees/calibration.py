"""Calibration of a drafter's path probabilities: how likely is a path to be accepted?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.model.backends.base import GrownTree

_PRIOR = 1.0, 2.0  # rejections and hazard
_DECAY, _PRIOR_SHARE = 0.98, 0.002  # weights of earlier drafts and of the prior, at each draft


class Calibration:
    """Learns the exponent k (``power``): a path of probability p is accepted with chance p ** k.
    Each token adds ``-log(its probability)`` to the path's hazard. The maximum-likelihood estimate
    of k is the number of rejections over the sum of hazards tried. (SmolLM2's 4-bit copy, greedy:
    0.1; with noise on its weights: 1; its EAGLE-3 head, greedy: 2; sampled: 1.)"""

    def __init__(self) -> None:
        self._rejections, self._hazard = _PRIOR

    @property
    def power(self) -> float:
        return self._rejections / self._hazard

    def path_prob(self, chance: float) -> float:
        """The probability of a path that is accepted with ``chance``; 0 for 0."""
        return chance ** (1 / self.power) if chance > 0 else 0.0

    def learn(self, scores: Sequence[float], rejected: bool) -> None:
        """``scores``: log-probability of the path to each verified token. All tokens were accepted,
        or all but the last one (``rejected``)."""
        hazards = [before - score for before, score in pairwise((0.0, *scores))]
        # Half of a rejected token's hazard counts.
        hazard = sum(hazards[:-1]) + hazards[-1] / (2 if rejected else 1)
        if math.isfinite(hazard):
            self._rejections = _DECAY * self._rejections + _PRIOR_SHARE * _PRIOR[0] + rejected
            self._hazard = _DECAY * self._hazard + _PRIOR_SHARE * _PRIOR[1] + hazard


class Calibrations:
    """A drafter's calibrations for greedy and for sampled requests, learnt from verdicts."""

    def __init__(self) -> None:
        self._by_greedy = {True: Calibration(), False: Calibration()}
        self._unverified: dict[int, tuple[Calibration, GrownTree]] = {}

    def of(self, params: SamplingParams) -> Calibration:
        return self._by_greedy[params.greedy]

    def proposed(self, seq_id: int, params: SamplingParams, grown: GrownTree) -> None:
        """Remember a proposed tree until ``observe`` sees its verdict."""
        if any(grown.scores):
            self._unverified[seq_id] = self.of(params), grown

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn from the commits how far the likeliest child of each accepted node was right."""
        for commit in commits:
            calibration, grown = self._unverified.pop(commit.seq_id, (None, None))
            if calibration and grown and 0 < commit.reached <= len(grown.scores) == commit.drafted:
                for scores, rejected in _verified_runs(grown, commit.path, commit.reached):
                    calibration.learn(scores, rejected)

    def forget(self, seq_id: int) -> None:
        self._unverified.pop(seq_id, None)


def _verified_runs(
    grown: GrownTree, path: Sequence[int], reached: int
) -> list[tuple[Sequence[float], bool]]:
    """The arguments of ``Calibration.learn`` for the first ``reached`` levels. A run follows the
    likeliest children while they are accepted. If a sibling was accepted instead, the run ends with
    a rejection, and the next run starts below the sibling."""
    likeliest: dict[int, int] = {}
    for node, parent in enumerate(grown.tree.parents):
        best = likeliest.setdefault(parent, node)
        if grown.scores[node] > grown.scores[best]:
            likeliest[parent] = node
    runs: list[tuple[Sequence[float], bool]] = []
    run, start, parent = list[float](), 0.0, -1
    for level in range(reached):
        if parent not in likeliest:
            break
        node = likeliest[parent]
        accepted = path[level] if level < len(path) else -1
        run.append(grown.scores[node] - start)
        if accepted != node:
            runs.append((run, True))
            run, start = [], grown.scores[accepted]
        parent = accepted
    return [*runs, (run, False)] if run else runs
