"""The search for the layers to skip, against made-up worths of layers."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.draft.layer_skip import Layers, SkipSearch, skippable, spread

WORTH = {1: 0.03, 2: -0.02, 3: -0.12, 4: 0.05, 5: 0.0, 6: 0.08, 7: -0.05, 8: 0.1, 9: 0.06, 10: -0.2}
BEST = (1, 4, 6, 8, 9)


def share(layers: Layers, luck: random.Random, ease: float) -> float:
    """What a window of some ease shows of a set: its worth, with the noise of 32 tokens."""
    return ease + sum(WORTH[n] for n in layers) + luck.gauss(0.0, 0.07)


def search_over(seed: int, tries: int = 160) -> SkipSearch:
    luck = random.Random(seed)
    search = SkipSearch(skippable(12), 5, tries)
    while sets := search.sets():
        ease = luck.uniform(0.2, 0.6)
        search.learn_scores([(layers, share(layers, luck, ease)) for layers in sets])
    return search


def test_it_finds_good_layers_through_the_noise() -> None:
    """Windows differ by more than sets do, and single scores mislead."""
    start = sum(WORTH[n] for n in SkipSearch(skippable(12), 5).best)
    best = sum(WORTH[n] for n in BEST)
    found = [sum(WORTH[n] for n in search_over(seed).best) for seed in range(10)]
    assert start < 0.02 and best == pytest.approx(0.32)
    assert min(found) > 0.2 and sum(found) / len(found) > 0.25


def test_without_noise_it_finds_the_best() -> None:
    search = SkipSearch(skippable(12), 5, tries=400)
    while sets := search.sets():
        search.learn_scores([(layers, 0.4 + sum(WORTH[n] for n in layers)) for layers in sets])
    assert search.best == BEST


def test_the_same_scores_give_the_same_search() -> None:
    assert search_over(3).best == search_over(3).best
    first, again = (SkipSearch(skippable(12), 5) for _ in range(2))
    assert first.sets() == again.sets() != first.sets()


def test_sets_are_the_best_and_distinct_others_of_the_same_size() -> None:
    search = SkipSearch((1, 2, 3, 4), 2)
    sets = search.sets(3)
    assert sets[0] == search.best == (2, 4) and len(set(sets)) == 4
    assert set(sets) <= set(itertools.combinations((1, 2, 3, 4), 2))


def test_it_ends() -> None:
    """After its tries, when the best is right for long, or when there is nothing else to try."""
    search = SkipSearch(skippable(12), 5, tries=9)
    for windows in (1, 2, 3):
        search.learn_scores([(layers, 0.5) for layers in search.sets()])
        assert search.over == (windows == 3)
    assert SkipSearch(skippable(12), 5, tries=0).over
    search = SkipSearch(skippable(12), 5)
    for windows in range(1, 5):
        search.learn_scores([(layers, 1.0) for layers in search.sets()])
        assert search.over == (windows == 4)
    assert search.best == SkipSearch(skippable(12), 5).best
    search = SkipSearch((1,), 1)
    assert search.sets() == [] and search.over


def test_where_it_starts() -> None:
    assert skippable(12) == tuple(range(1, 11))
    assert skippable(2) == (1,) and skippable(1) == ()
    assert spread(range(1, 11), 5) == (2, 4, 6, 8, 10)
    assert spread((1, 2, 3), 1) == (2,) and spread((1, 2, 3), 3) == (1, 2, 3)
