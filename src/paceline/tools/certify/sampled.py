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


@dataclass(frozen=True)
class Judged:
    """All tests of what was drawn at a place, with drafts and plainly.

    Where nothing is left to chance there are none.
    """

    name: str
    tests: tuple[DistributionTest, ...]
    frequencies: Frequencies


def judge(model: CausalModel, place: Place, params: SamplingParams, seed: int) -> Judged:
    """Cells are as fine as the number of samples allows; the distributions are scored afresh."""
    scorer = Scorer(model, place.start, params)
    samples = min(len(place.drawn), len(place.plain))
    partitions = [Partition.of(scorer, tokens, samples) for tokens in (1, DEPTH)]
    first = partitions[0].cells
    if all(len(leaf) == 1 for leaf in partitions[-1].cells.leaves):
        partitions.pop()  # no first token is likely enough to be split: the same cells again
    found: list[DistributionTest] = []
    for length, strings in ((place.length, place.drawn), (0, place.plain)):
        for part in partitions:
            about = (len(part.cells), part.rounding, len(strings))
            name = "first token" if part.tokens == 1 else f"first {part.tokens}"
            counts = part.cells.counts(strings)
            tests = [(f"{name} / distribution", goodness(counts, part.cells.chances, part.slack))]
            if length and part is partitions[-1]:
                plain = part.cells.counts(place.plain)
                tests.append((f"{name} / plain", homogeneity(counts, plain, part.slack)))
            for what, outcome in tests:
                found.append(DistributionTest(place.name, length, what, outcome, *about))
        each = each_token(scorer, strings, _MARGIN, seed)
        if each is not None:
            about = (each.outcome.df + DEPTH, each.rounding, each.looked_at)
            what = "each token / distribution"
            found.append(DistributionTest(place.name, length, what, each.outcome, *about))
    tested = tuple(test for test in found if test.outcome.df > 0)
    return Judged(place.name, tested, frequencies(place, first))


def frequencies(place: Place, cells: Cells, most: int = 12) -> Frequencies:
    """Expected and observed shares of the likeliest first tokens."""
    alone = [(cells.chances[cell], string[0], cell) for string, cell in cells.leaves.items()]
    # A cell that took the rare tokens in is no longer one token's.
    alone = [entry for entry in alone if entry[2] not in cells.rest.values()]
    likeliest = sorted(alone, reverse=True)[:most]
    counts, samples = cells.counts(place.drawn), len(place.drawn)
    return Frequencies(
        place.name,
        samples,
        tuple(token for _, token, _ in likeliest),
        tuple(chance for chance, _, _ in likeliest),
        tuple(counts[cell] / samples for _, _, cell in likeliest),
    )
