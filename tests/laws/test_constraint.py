"""Constrained decoding keeps the distribution: the target's own, with what is forbidden at
probability 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import (
    Setting,
    distance,
    joint_distribution,
    plain_distribution,
    point_tree,
    sampled_chain,
    sampled_tree,
    step_distribution,
)
from placed import Placed, verifier_distribution

from paceline.core.params import SamplingParams

PARAMS = {
    "plain": SamplingParams(temperature=0.8),
    "greedy": SamplingParams(),
    "top_p and penalties": SamplingParams(temperature=1.1, top_p=0.8, presence_penalty=0.5),
}
CASES = {
    "point tree": (point_tree((2, 2)), 2, "match"),
    "chain, token rule": (sampled_chain(2), 2, "siblings"),
    "chain, block": (sampled_chain(2), 2, "block"),
    "siblings": (sampled_tree((2, 1)), 2, "siblings"),
}


class NoneTwice:
    """Forbids the token that stands last: which one that is depends on the drafted path."""

    def __init__(self, context, vocab):
        self.tokens, self.vocab = list(context), vocab

    def read(self, tokens):
        self.tokens += tokens

    def allowed(self, path):
        mask = torch.ones(self.vocab, dtype=torch.bool)
        mask[[*self.tokens, *path][-1]] = False
        return mask


def constrained(params, vocab=4, seed=5):
    setting = Setting.random(vocab, params, seed)
    return replace(setting, constraint=lambda context: NoneTwice(context, vocab))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_law_is_the_constrained_targets(case, params):
    drafter, depth, method = case
    setting = constrained(params)
    expected = plain_distribution(setting, 3)
    assert (
        distance(
            joint_distribution(setting, step_distribution(setting, drafter, depth, method), 3),
            expected,
        )
        < 1e-6
    )
    repeats = expected.view(4, 4, 4).diagonal(dim1=0, dim2=1)
    assert float(repeats.abs().sum()) == 0.0
    assert distance(expected, plain_distribution(replace(setting, constraint=None), 3)) > 0.01


@pytest.mark.parametrize("method", ["match", "siblings", "block"])
def test_through_the_whole_verifier(method):
    params = PARAMS["plain"]
    setting = constrained(params, vocab=3)
    drafter = point_tree((2, 1)) if method == "match" else sampled_chain(2)
    verifier = Placed("token" if method == "siblings" else "auto")
    step = verifier_distribution(setting, drafter, 2, verifier, method)
    assert distance(joint_distribution(setting, step, 2), plain_distribution(setting, 2)) < 1e-6


def test_a_drafter_that_knows_nothing_of_it_is_as_lossless():
    """Its q gives mass to forbidden tokens; they are rejected."""
    setting = constrained(PARAMS["plain"])
    ignorant = replace(setting, constraint=None)

    def step_of(method):
        from harness import distribution_table

        table = {}

        def drafter(_):
            return sampled_chain(2)(table["draft"])

        inner = step_distribution(setting, drafter, 2, method)

        def step(context):
            table["draft"] = distribution_table(ignorant.draft, ignorant, context, 2)
            return inner(context)

        return step

    for method in ("siblings", "block"):
        assert (
            distance(
                joint_distribution(setting, step_of(method), 3), plain_distribution(setting, 3)
            )
            < 1e-6
        )


def test_forgetting_the_path_is_noticed():
    """The mutation: every row is masked as if nothing had been drafted before it."""

    class Forgetful(NoneTwice):
        def allowed(self, path):
            return super().allowed(())

    setting = constrained(PARAMS["plain"])
    broken = replace(setting, constraint=lambda context: Forgetful(context, 4))
    distribution = joint_distribution(
        setting, step_distribution(broken, sampled_chain(2), 2, "block"), 3
    )
    assert distance(distribution, plain_distribution(setting, 3)) > 0.01
