"""Every token of the samples against the distribution that its own beginning gives it.

Strings are too many to count one by one, so every token is turned into a number by its
distribution's cumulative function, likeliest tokens first and randomised within a token's step:
under the target's distribution these numbers are uniform, whatever the beginnings were. Only the
beginnings that occur most are looked at; that depends on what came before the token, so it favours
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tools.certify.cells import String
from paceline.tools.certify.chisquare import ChiSquare, goodness, tail
from paceline.tools.certify.scoring import Scorer

_BINS = 10
_MOST = 64  # beginnings of each length


def shares(probs: torch.Tensor, bins: int) -> torch.Tensor:
    """float64 [vocab, bins]: how each token's step of the cumulative function lies in equal bins.

    A token without a chance (``probs`` [vocab]), or hardly any, lies at the end.
    """
    order = probs.argsort(descending=True, stable=True)
    steps = probs[order].double()
    ends = steps.cumsum(-1)[:, None]
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins * ends[-1]
    inside = torch.minimum(ends, edges[1:]) - torch.maximum(ends - steps[:, None], edges[:-1])
    inside = inside.clamp(min=0.0)
    inside[inside.sum(-1) <= 0, -1] = 1.0
    return torch.empty_like(inside).index_copy_(0, order, inside / inside.sum(-1, keepdim=True))


@dataclass(frozen=True)
class EachToken:
    """Outcome over all positions; ``looked_at`` tokens, ``rounding`` between batch shapes."""

    outcome: ChiSquare
    looked_at: int
    rounding: float


def each_token(
    scorer: Scorer, strings: Sequence[String], margin: float, seed: int
) -> EachToken | None:
    """Test of every token of each string; None if there are too few.

    ``margin``: how many times the difference between two batch shapes is allowed for.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[ChiSquare] = []
    moves: list[float] = []
    for position in range(len(strings[0]) if strings else 0):
        counts, expected = _position(scorer, strings, position, generator)
        total = sum(counts)
        if total < 5 * _BINS:
            continue
        even = [1 / _BINS] * _BINS
        effect = sum((mass - 1 / _BINS) ** 2 * _BINS for mass in expected)
        parts.append(goodness(counts, even, margin**2 * effect))
        moves.append(total * sum(abs(mass - 1 / _BINS) for mass in expected) / 2)
    if not parts:
        return None
    df, weight = sum(part.df for part in parts), sum(part.weight for part in parts)
    statistic, allowed = sum(p.statistic for p in parts), sum(p.allowed for p in parts)
    joint = ChiSquare(statistic, df, tail(statistic, df, allowed), weight, allowed)
    return EachToken(joint, int(weight), sum(moves) / weight)


def _position(
    scorer: Scorer, strings: Sequence[String], position: int, generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """Bin counts at one position, and the bins' masses under the other batch shape's
    distributions."""
    following: defaultdict[String, list[int]] = defaultdict(list)
    for string in strings:
        following[string[:position]].append(string[position])
    often = Counter({head: len(tokens) for head, tokens in following.items()})
    heads = [head for head, _ in often.most_common(_MOST)]
    counts = torch.zeros(_BINS, dtype=torch.int64)
    masses = torch.zeros(_BINS, dtype=torch.float64)
    distributions = zip(heads, scorer.at_once(heads), scorer.stepwise(heads), strict=True)
    for head, probs, moved in distributions:
        own, tokens = shares(probs, _BINS), torch.tensor(following[head])
        places = torch.multinomial(own[tokens], 1, generator=generator)
        counts += torch.bincount(places[:, 0], minlength=_BINS)
        masses += len(tokens) * (moved.double() @ own)
    return counts.tolist(), (masses / masses.sum()).tolist()
