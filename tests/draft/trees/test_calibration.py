"""The chance of a drafted path, learnt from what was accepted."""

from __future__ import annotations

import math
import random

import pytest
import torch

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.tree import TokenTree
from paceline.draft.trees.calibration import Calibration, Calibrations
from paceline.model.backends.base import GrownTree


def drafts(power: float, count: int) -> Calibration:
    """The calibration after ``count`` chains whose tokens are accepted with chance p ** power."""
    confidence, rng = Calibration(), random.Random(1)
    for _ in range(count):
        scores = [0.0]
        for _ in range(8):
            p = rng.uniform(0.2, 1.0)
            scores.append(scores[-1] + math.log(p))
            if refused := rng.random() > p**power:
                break
        confidence.learn(scores[1:], refused)
    return confidence


@pytest.mark.parametrize("power", [0.05, 0.3, 1.0, 1.5])
def test_what_is_accepted_teaches_the_power(power: float) -> None:
    found = sum(drafts(power, 500 + n).power for n in range(60)) / 60
    assert found == pytest.approx(power, rel=0.2)


def test_a_wanted_chance_as_a_probability_of_the_drafter() -> None:
    sure, unsure = drafts(0.1, 300), drafts(1.5, 300)
    assert sure.path_prob(0.6) < 0.1 < 0.5 < unsure.path_prob(0.6)
    assert sure.path_prob(0.6) ** sure.power == pytest.approx(0.6)
    assert sure.path_prob(0.0) == 0.0


def test_drafts_that_are_never_refused_go_on_to_the_end() -> None:
    confidence = Calibration()
    for _ in range(2000):
        confidence.learn([-1.0, -5.0], False)
    assert confidence.path_prob(0.6) < 1e-30 and confidence.power > 0
    confidence.learn([-1.0, -math.inf], True)  # of a row that was no distribution
    assert math.isfinite(confidence.power)


# 0 and 1 below the text, 2 and 3 below node 0, 4 below node 1.
TREE = GrownTree(
    TokenTree(torch.arange(5), (-1, -1, 0, 0, 1)),
    (0, 1, -1, -1, -1),
    tuple(math.log(p) for p in (0.5, 0.25, 0.3, 0.1, 0.125)),
)


@pytest.mark.parametrize(
    ("path", "reached", "tried"),
    [
        ((), 1, [(0.5, True)]),
        ((0,), 2, [(0.5, False), (0.6, True)]),
        ((0, 2), 2, [(0.5, False), (0.6, False)]),
        ((0, 3), 2, [(0.5, False), (0.6, True)]),
        ((1,), 2, [(0.5, True), (0.5, True)]),  # of node 1's child, by its parent
        ((1, 4), 2, [(0.5, True), (0.5, False)]),
        ((), 0, []),  # the text ended before
    ],
)
def test_a_tree_tries_the_likeliest_child_of_each_node_of_the_path(
    path: tuple[int, ...], reached: int, tried: list[tuple[float, bool]]
) -> None:
    drafter, expected, params = Calibrations(), Calibration(), SamplingParams()
    drafter.proposed(7, params, TREE)
    drafter.observe([Commit(7, (1,) * (len(path) + 1), path, 5, 2, reached)])
    run: list[float] = []
    for p, refused in tried:
        run.append(math.log(p) + sum(run[-1:]))
        if refused:
            expected.learn(run, True)
            run = []
    if run:
        expected.learn(run, False)
    assert drafter.of(params).power == pytest.approx(expected.power)
    assert drafter.of(SamplingParams(temperature=1.0)).power == Calibration().power
