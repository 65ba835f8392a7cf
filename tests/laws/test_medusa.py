"""Heads that do not see each other's tokens: all nodes of a level share one draw of candidates."""

import itertools

import pytest
import torch
from harness import Drafts, Draw, SamplingParams, Setting, error

from paceline.draft.trees.shape import Shape

PLAIN = SamplingParams(temperature=1.0)
EXACT, CAUGHT = 1e-6, 1e-3


def crossed(paths, level_strings=(0, 2), order=None):
    """Every draft of a tree of two levels, each level drawn once without replacement.

    The distribution of a level is that after a fixed string: it knows nothing of the drafted
    tokens.
    """
    shape = Shape.of_paths(paths)
    depths = [1 if parent < 0 else 2 for parent in shape.parents]

    def propose(table):
        vocab = table.shape[1]
        probs = [table[string].double() for string in level_strings]
        tokens, weights = [], []
        for draws in itertools.product(itertools.permutations(range(vocab)), repeat=2):
            chance = 1.0
            for distribution, drawn in zip(probs, draws, strict=True):
                left = distribution.clone()
                for token in drawn:
                    chance *= float(left[token] / left.sum())
                    left[token] = 0.0
            nodes = zip(depths, shape.ranks, strict=True)
            tokens.append([draws[depth - 1][rank] for depth, rank in nodes])
            weights.append(chance)
        q = torch.stack([probs[depth - 1] for depth in depths]).float()
        q = q.expand(len(tokens), *q.shape)
        weight = torch.tensor(weights, dtype=torch.float64)
        drawn = Draw.WITHOUT_REPLACEMENT
        return [Drafts(shape.parents, drawn, torch.tensor(tokens), weight, vocab, q)]

    return propose


@pytest.mark.parametrize("paths", [[(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0), (2, 0), (2, 1)]])
def test_one_draw_a_level_is_lossless(paths):
    assert error(Setting.random(3, PLAIN), crossed(paths), 2, "siblings") < EXACT


def test_the_distribution_of_another_level_is_caught():
    setting = Setting.random(3, PLAIN)
    honest = crossed([(0, 0), (0, 1), (1, 0)])

    def mislabelled(table):
        (drafts,) = honest(table)
        return [
            Drafts(drafts.parents, drafts.draw, drafts.tokens, drafts.weights, 3, drafts.q.flip(1))
        ]

    assert error(setting, mislabelled, 2, "siblings") > CAUGHT
