"""Constrained decoding keeps the distribution: the target's own, with what is forbidden at
probability 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import (
    Setting,
    distance,
    dynamic_tree,
    joint_distribution,
    plain_distribution,
    point_tree,
    sampled_chain,
    sampled_tree,
    step_distribution,
    strings,
)
from verifier_enumeration import FixedUniforms, verifier_distribution

from paceline.core.params import SamplingParams
from paceline.core.tree import TokenTree

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

    def consume(self, tokens):
        self.tokens += tokens

    def allowed_tokens(self, path):
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
    verifier = FixedUniforms("token" if method == "siblings" else "auto")
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


# --- drafts behind what a grammar forces ---------------------------------------------------------


class Follows(NoneTwice):
    """After 0 only 1 is allowed, after 1 only 2."""

    def allowed_tokens(self, path):
        last = [*self.tokens, *path][-1]
        return torch.arange(self.vocab) == last + 1 if last < 2 else super().allowed_tokens(path)


def below_chain(tree, chain):
    """The tree below a chain of tokens that are certain."""
    above, tokens, q = len(chain), torch.tensor(chain, dtype=torch.int64), tree.q
    if q is not None:
        q = torch.cat([torch.nn.functional.one_hot(tokens, q.shape[1]).to(q.dtype), q])
    parents = (*range(-1, above - 1), *(parent + above for parent in tree.parents))
    return replace(tree, tokens=torch.cat([tokens, tree.tokens]), parents=parents, q=q)


def below_forced(make, depth, below=below_chain):
    """Drafts of ``make(levels)`` below the chain of forced tokens."""

    def propose(table):
        vocab, run, node = table.shape[1], [], 0
        while len(run) < depth - 1 and int((table[node] > 0).sum()) == 1:
            run.append(int(table[node].argmax()))
            node = 1 + vocab * node + run[-1]
        known = {path: number for number, path in enumerate(strings(vocab, depth))}
        behind = [known[(*run, *path)] for path in strings(vocab, depth - len(run))]
        return [whole(drafts, run) for drafts in make(depth - len(run))(table[behind])]

    def whole(drafts, run):
        q = drafts.q if drafts.q is not None else [None] * len(drafts.tokens)
        trees = [
            below(TokenTree(tokens, drafts.parents, drafts.draw, row), run)
            for tokens, row in zip(drafts.tokens, q, strict=True)
        ]
        return replace(
            drafts,
            parents=trees[0].parents,
            tokens=torch.stack([tree.tokens for tree in trees]),
            q=None if drafts.q is None else torch.stack([tree.q for tree in trees]),
        )

    return propose


BELOW = {
    "point tree": (lambda levels: point_tree((2, 1, 1)[:levels]), "match"),
    "dynamic tree": (lambda levels: dynamic_tree(levels, 4), "match"),
    "chain, block": (sampled_chain, "block"),
    "siblings": (lambda levels: sampled_tree((2, 1, 1)[:levels]), "siblings"),
}


def forcing(params):
    setting = Setting.random(4, params, 5)
    return replace(setting, constraint=lambda context: Follows(context, 4))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("case", BELOW.values(), ids=BELOW.keys())
def test_trees_below_forced_text_keep_the_law(case, params):
    make, method = case
    setting = forcing(params)
    step = step_distribution(setting, below_forced(make, 3), 3, method)
    expected = plain_distribution(setting, 4)
    assert distance(joint_distribution(setting, step, 4), expected) < 1e-6
    first = expected.view(4, -1)  # the prompt ends with 1
    assert float(first[2].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("case", ["chain, block", "siblings"])
def test_forgetting_how_tokens_below_were_drawn_is_noticed(case):
    """The mutation treats them as if they were drawn uniformly."""

    def evenly(tree, run):
        q = torch.full_like(tree.q, 1 / tree.q.shape[1])
        return below_chain(replace(tree, q=q), run)

    make, method = BELOW[case]
    setting = forcing(PARAMS["plain"])
    step = step_distribution(setting, below_forced(make, 3, evenly), 3, method)
    assert distance(joint_distribution(setting, step, 4), plain_distribution(setting, 4)) > 0.01


def test_forgetting_the_path_is_noticed():
    """The mutation: every row is masked as if nothing had been drafted before it."""

    class Forgetful(NoneTwice):
        def allowed_tokens(self, path):
            return super().allowed_tokens(())

    setting = constrained(PARAMS["plain"])
    broken = replace(setting, constraint=lambda context: Forgetful(context, 4))
    distribution = joint_distribution(
        setting, step_distribution(broken, sampled_chain(2), 2, "block"), 3
    )
    assert distance(distribution, plain_distribution(setting, 3)) > 0.01
