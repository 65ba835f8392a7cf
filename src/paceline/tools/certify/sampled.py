"""The output distribution of unseeded sampling, tested on many short continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.params import SamplingParams
from paceline.drafters import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.model.target import CausalModel
from paceline.tools.certify.cells import Cells, String, make_cells
from paceline.tools.certify.chisquare import ChiSquare, goodness, homogeneity
from paceline.tools.certify.decoding import DecodedOutput, Start, decode
from paceline.tools.certify.each import each_token
from paceline.tools.certify.evidence import Place
from paceline.tools.certify.scoring import Scorer

DEPTH = 3  # tokens of a continuation that are tested together
PORTIONS = 10  # in which the samples of a place are drawn
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
    samples: int
    cells: int
    outcome: ChiSquare
    rounding: float


@dataclass(frozen=True)
class Frequencies:
    """What the figure shows: the likeliest first tokens, expected and observed."""

    prefix: str
    draft_length: int
    samples: int
    tokens: tuple[int, ...]
    expected: tuple[float, ...]
    observed: tuple[float, ...]


@dataclass(frozen=True)
class Prefix:
    """A place at which continuations are drawn, with what is known of the distribution there."""

    name: str
    start: Start
    scorer: Scorer
    partitions: tuple[Partition, ...]  # of the first token, and of the first DEPTH if they split


def choose_start(
    model: CausalModel,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    rank: float,
) -> tuple[float, Start]:
    """A beginning of prompt and output after which the target is undecided, and its distribution's
    entropy.

    Of the places in ``output`` the one whose entropy (nats) has this ``rank`` (1 is the highest).
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


def describe(
    model: CausalModel, name: str, start: Start, params: SamplingParams, samples: int
) -> Prefix:
    scorer = Scorer(model, start, params)
    partitions = [Partition.of(scorer, tokens, samples) for tokens in (1, DEPTH)]
    if all(len(leaf) == 1 for leaf in partitions[-1].cells.leaves):
        partitions.pop()  # no first token is likely enough to be split: the same cells again
    return Prefix(name, start, scorer, tuple(partitions))


def continuations(
    engine: Engine,
    start: Start,
    params: SamplingParams,
    length: int,
    samples: int,
    enough: int = DEPTH,
) -> list[DecodedOutput]:
    """So many samples of ``enough`` tokens each."""
    max_tokens = len(start.output) + DEPTH + length + 1
    drawing = replace(params, seed=None, n=1, min_tokens=0, max_tokens=max_tokens)
    return decode(engine, [start] * samples, drawing, length, enough=enough)


def tests_of(
    prefix: Prefix, length: int, drawn: Sequence[String], plain: Sequence[String], seed: int
) -> list[DistributionTest]:
    """All tests of one prefix and draft length; where nothing is left to chance there are none."""
    tests: list[DistributionTest] = []

    def add(what: str, cells: int, outcome: ChiSquare, rounding: float, samples: int) -> None:
        if outcome.df > 0:
            tests.append(
                DistributionTest(prefix.name, length, what, samples, cells, outcome, rounding)
            )

    for partition in prefix.partitions:
        cells, slack, rounding = partition.cells, partition.slack, partition.rounding
        counts = cells.counts(drawn)
        name = "first token" if partition.tokens == 1 else f"first {partition.tokens}"
        distribution = goodness(counts, cells.chances, slack)
        add(f"{name} / distribution", len(cells), distribution, rounding, len(drawn))
        if length and partition is prefix.partitions[-1]:
            two = homogeneity(counts, cells.counts(plain), slack)
            add(f"{name} / plain", len(cells), two, rounding, len(drawn))
    each = each_token(prefix.scorer, drawn, _MARGIN, seed)
    if each is not None:
        bins = each.outcome.df + DEPTH
        add("each token / distribution", bins, each.outcome, each.rounding, each.looked_at)
    return tests


@dataclass(frozen=True)
class Judged:
    """All tests of what was drawn at a place, with drafts and plainly."""

    name: str
    tests: tuple[DistributionTest, ...]
    frequencies: Frequencies


def judge(model: CausalModel, place: Place, params: SamplingParams, seed: int) -> Judged:
    """Cells are as fine as the number of samples allows; the distributions are scored afresh."""
    count = min(len(place.drawn), len(place.plain))
    prefix = describe(model, place.name, place.start, params, count)
    found = tests_of(prefix, place.length, place.drawn, place.plain, seed)
    found += tests_of(prefix, 0, place.plain, place.plain, seed)
    return Judged(place.name, tuple(found), frequencies(prefix, place.length, place.drawn))


def frequencies(
    prefix: Prefix, length: int, drawn: Sequence[String], most: int = 12
) -> Frequencies:
    """Expected and observed shares of the likeliest first tokens."""
    cells = prefix.partitions[0].cells
    alone = [(cells.chances[cell], string[0], cell) for string, cell in cells.leaves.items()]
    # A cell that took the rare tokens in is no longer one token's.
    alone = [entry for entry in alone if entry[2] not in cells.rest.values()]
    likeliest = sorted(alone, reverse=True)[:most]
    counts = cells.counts(drawn)
    return Frequencies(
        prefix.name,
        length,
        len(drawn),
        tuple(token for _, token, _ in likeliest),
        tuple(chance for chance, _, _ in likeliest),
        tuple(counts[cell] / len(drawn) for _, _, cell in likeliest),
    )
