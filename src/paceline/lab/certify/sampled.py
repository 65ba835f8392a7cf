"""The output distribution of unseeded sampling, tested on many short continuations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.params import SamplingParams
from paceline.drafters import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.lab.certify.cells import Cells, String, make_cells
from paceline.lab.certify.chisquare import ChiSquare, goodness, homogeneity, joined
from paceline.lab.certify.decoding import DecodedOutput, Start, decode
from paceline.lab.certify.evidence import Prefix
from paceline.lab.certify.scoring import Scorer
from paceline.model.target import CausalModel

# -- token by token --------------------------------------------------------------------------------
# Strings are too many to count one by one, so every token is turned into a number by the
# cumulative function of the distribution that its own beginning gives it, likeliest tokens first
# and randomised within a token's step: under the target's distribution these numbers are uniform,
# whatever the beginnings were. Only the beginnings that occur most are looked at; that depends on
# what came before the token, so it favours nothing.

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
    joint = joined(parts)
    return EachToken(joint, int(joint.weight), sum(moves) / joint.weight)


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
        observed, tokens = shares(probs, _BINS), torch.tensor(following[head])
        bins = torch.multinomial(observed[tokens], 1, generator=generator)
        counts += torch.bincount(bins[:, 0], minlength=_BINS)
        masses += len(tokens) * (moved.double() @ observed)
    return counts.tolist(), (masses / masses.sum()).tolist()


DEPTH = 3  # tokens of a continuation that are tested together
PORTIONS = 10  # in which the samples of a prefix are drawn
_BEYOND_BLOCK = 4  # tokens of a prefix that no full cache block shares: cheap to read again
_MOST_CELLS = 150
_LEAST_EXPECTED = 5.0  # samples in a cell, the usual rule for chi-square
# Either sample may differ from the scored distribution by what two batch shapes differ by.
_MARGIN = 2.0


@dataclass(frozen=True)
class Partition:
    """Cells over the first tokens, and how far rounding moves their chances.

    ``slack`` is the effect size w² that the test allows for it, ``rounding`` the total variation
    between the distributions of the two batch shapes.
    """

    tokens: int
    cells: Cells
    slack: float
    rounding: float

    @classmethod
    def of(cls, scorer: Scorer, tokens: int, samples: int) -> Partition:
        least = max(_LEAST_EXPECTED / samples, 1 / _MOST_CELLS)
        cells = make_cells(scorer.at_once, tokens, least)
        moved = cells.chances_under(scorer.stepwise)
        pairs = list(zip(cells.chances, moved, strict=True))
        effect = sum((a - b) ** 2 / a for a, b in pairs if a > 0)
        rounding = sum(abs(a - b) for a, b in pairs) / 2
        return cls(tokens, cells, _MARGIN**2 * effect, rounding)


@dataclass(frozen=True)
class DistributionTest:
    """One test: ``what`` against what, on which prefix, at which draft length (0 is plain).

    ``distribution`` is the target's, scored afresh; ``plain`` a sample of plain decoding. The test
    of the drafter's draws has the draft length -1.
    """

    prefix: str
    draft_length: int
    what: str
    outcome: ChiSquare
    cells: int
    rounding: float
    samples: int


@dataclass(frozen=True)
class Frequencies:
    """What the figure shows: the likeliest first tokens, expected and observed."""

    prefix: str
    samples: int
    tokens: tuple[int, ...]
    expected: tuple[float, ...]
    observed: tuple[float, ...]


def choose_start(
    model: CausalModel,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    rank: float,
) -> tuple[float, Start]:
    """A beginning of prompt and output after which the target is undecided, and its distribution's
    entropy.

    Of the prefixes in ``output`` the one whose entropy (nats) has this ``rank`` (1 is the highest).
    Only those a few tokens behind a full cache block count, as thousands of samples start there.
    """
    whole = Start(tuple(prompt))
    ends = [
        end
        for end in range(len(output) + 1)
        if 0 < (len(prompt) + end) % BLOCK_SIZE <= _BEYOND_BLOCK
    ]
    heads: list[String] = [tuple(output[:end]) for end in ends or (len(output),)]
    distributions = Scorer(model, whole, params).at_once(heads)
    entropies = torch.special.entr(distributions).sum(-1)
    order = entropies.argsort().tolist()
    chosen = order[round(rank * (len(order) - 1))]
    return float(entropies[chosen]), Start(whole.prompt, heads[chosen])


def continuations(
    engine: Engine,
    start: Start,
    params: SamplingParams,
    length: int,
    samples: int,
    enough: int = DEPTH,
) -> list[DecodedOutput]:
    """So many samples of ``enough`` tokens each."""
    max_tokens = len(start.output) + max(DEPTH, enough) + length + 1
    drawing = replace(params, seed=None, n=1, min_tokens=0, max_tokens=max_tokens)
    return decode(engine, [start] * samples, drawing, length, enough=enough)


@dataclass(frozen=True)
class Judged:
    """All tests of what was drawn at a prefix, with drafts and plainly.

    Where nothing is left to chance there are none.
    """

    name: str
    tests: tuple[DistributionTest, ...]
    frequencies: Frequencies


def judge(model: CausalModel, prefix: Prefix, params: SamplingParams, seed: int) -> Judged:
    """Cells are as fine as the number of samples allows; the distributions are scored afresh."""
    scorer = Scorer(model, prefix.start, params)
    samples = min(len(prefix.drawn), len(prefix.plain))
    partitions = [Partition.of(scorer, tokens, samples) for tokens in (1, DEPTH)]
    first = partitions[0].cells
    if all(len(leaf) == 1 for leaf in partitions[-1].cells.leaves):
        partitions.pop()  # no first token is likely enough to be split: the same cells again
    rows: list[DistributionTest] = []
    for length, strings in ((prefix.length, prefix.drawn), (0, prefix.plain)):
        for part in partitions:
            about = (len(part.cells), part.rounding, len(strings))
            name = "first token" if part.tokens == 1 else f"first {part.tokens}"
            counts = part.cells.counts(strings)
            tests = [(f"{name} / distribution", goodness(counts, part.cells.chances, part.slack))]
            if length and part is partitions[-1]:
                plain = part.cells.counts(prefix.plain)
                tests.append((f"{name} / plain", homogeneity(counts, plain, part.slack)))
            for what, outcome in tests:
                rows.append(DistributionTest(prefix.name, length, what, outcome, *about))
        token_scores = each_token(scorer, strings, _MARGIN, seed)
        if token_scores is not None:
            about = (token_scores.outcome.df + DEPTH, token_scores.rounding, token_scores.looked_at)
            what = "each token / distribution"
            rows.append(DistributionTest(prefix.name, length, what, token_scores.outcome, *about))
    tested = tuple(test for test in rows if test.outcome.df > 0)
    return Judged(prefix.name, tested, frequencies(prefix, first))


def frequencies(prefix: Prefix, cells: Cells, most: int = 12) -> Frequencies:
    """Expected and observed shares of the likeliest first tokens."""
    alone = [(cells.chances[cell], string[0], cell) for string, cell in cells.leaves.items()]
    # A cell that took the rare tokens in is no longer one token's.
    alone = [entry for entry in alone if entry[2] not in cells.rest.values()]
    likeliest = sorted(alone, reverse=True)[:most]
    counts, samples = cells.counts(prefix.drawn), len(prefix.drawn)
    return Frequencies(
        prefix.name,
        samples,
        tuple(token for _, token, _ in likeliest),
        tuple(chance for chance, _, _ in likeliest),
        tuple(counts[cell] / samples for _, _, cell in likeliest),
    )
