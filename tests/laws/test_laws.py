"""Every drafter kind under every rule has the target's own distribution, exactly."""

import itertools

import pytest
import torch
from harness import (
    Draw,
    Fake,
    SamplingParams,
    Setting,
    distribution_table,
    dynamic_tree,
    empty,
    ending_chain,
    error,
    joint_distribution,
    no_repeats,
    point_tree,
    sampled_chain,
    sampled_tree,
    step_distribution,
    strings,
    tree_parents,
)
from verifier_enumeration import FixedUniforms, verifier_error

from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, chain_parents
from paceline.verify import rules, verifier
from paceline.verify.verifier import rule_for
from support.spans import judged

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=0.9, top_k=2),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7),
    "min_p": SamplingParams(temperature=0.9, min_p=0.3),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4
    ),
    "logit_bias": SamplingParams(temperature=0.9, logit_bias={0: 1.0, 2: -0.8}),
    "min_tokens": SamplingParams(temperature=0.9, min_tokens=2),
    "logits_processors": SamplingParams(temperature=0.9, logits_processors=(no_repeats,)),
    "greedy": SamplingParams(temperature=0.0),
    "all": SamplingParams(
        **{"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {1: 0.7}},
        min_tokens=1,
    ),
}
# drafter, its depth, method, vocabulary
CASES = {
    "none": (empty(), 0, "match", 4),
    "point chain": (point_tree((1, 1, 1)), 3, "match", 4),
    "point tree": (point_tree((2, 2, 1)), 3, "match", 4),
    "wide point tree": (point_tree((3, 1)), 2, "match", 5),
    "dynamic point tree": (dynamic_tree(3, 5), 3, "match", 4),
    "chain, token rule": (sampled_chain(3), 3, "siblings", 4),
    "chain, block": (sampled_chain(3), 3, "block", 4),
    "chain that ends, block": (ending_chain(3, 0.2), 3, "block", 4),
    "chain that ends, token rule": (ending_chain(3, 0.2), 3, "siblings", 4),
    "one, block": (sampled_chain(1), 1, "block", 5),
    "chain, coupled": (sampled_chain(3), 3, "match", 3),
    "siblings": (sampled_tree((2, 1, 1)), 3, "siblings", 3),
    "siblings, coupled": (sampled_tree((2, 1, 1)), 3, "match", 3),
    "siblings at depth 2": (sampled_tree((1, 3)), 2, "siblings", 4),
    "bushy siblings": (sampled_tree((2, 2)), 2, "siblings", 4),
    "siblings until q runs out": (sampled_tree((3, 2)), 2, "siblings", 3),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_distribution_of_three_tokens_is_the_targets(case, params):
    drafter, depth, method, vocab = case
    assert error(Setting.random(vocab, params), drafter, depth, method) < 1e-6


def test_dynamic_trees_take_many_shapes():
    """So the cases above do cover trees whose shape the distribution of the context decides."""
    setting, shapes = Setting.random(4, PARAMS["plain"]), set()
    for context in itertools.product(range(4), repeat=2):
        (drafts,) = dynamic_tree(3, 5)(distribution_table(setting.draft, setting, context, 3))
        shapes.add(drafts.parents)
    assert len(shapes) > 5


def test_deep_bushy_tree():
    setting = Setting.random(3, PARAMS["penalties"], seed=5)
    assert error(setting, sampled_tree((2, 2, 1)), 3, "siblings") < 1e-6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["siblings", "block"])
def test_draft_equal_to_target(method, seed):
    """Where p equals q the residual is empty, or rounding alone."""
    target = Fake(3, seed)
    setting = Setting(target, target, PARAMS["plain"])
    assert error(setting, sampled_chain(3), 3, method) < 1e-6


@pytest.mark.parametrize("method", ["siblings", "block"])
def test_draft_and_target_have_nothing_in_common(method):
    target, draft = Fake(4, 0), Fake(4, 1)
    target.table[..., 2:] = -float("inf")
    draft.table[..., :2] = -float("inf")
    setting = Setting(target, draft, PARAMS["plain"])
    assert error(setting, sampled_chain(2), 2, method) < 1e-6


@pytest.mark.parametrize("method", ["siblings", "block"])
def test_draft_that_knows_a_part_of_the_vocabulary(method):
    """Token-level intersection: q is renormalised over the tokens that both know."""
    setting = Setting.random(4, PARAMS["all"], seed=2)
    setting.draft.table[..., 1] = -float("inf")
    assert error(setting, sampled_chain(3), 3, method) < 1e-6
    assert error(setting, sampled_tree((2, 1)), 2, "siblings") < 1e-6


def hollow(drafter, vocab, depth, share=3):
    """The drafter, with nothing to propose after every ``share``-th string: a distribution of
    zeros."""

    def propose(table):
        keep = [number % share != 1 for number in range(len(strings(vocab, depth)))]
        return drafter(table * torch.tensor(keep, dtype=table.dtype).unsqueeze(1))

    return propose


@pytest.mark.parametrize("name", ["plain", "top_p", "penalties"])
@pytest.mark.parametrize("share", [2, 3, 5])
@pytest.mark.parametrize(
    "case", ["chain, block", "chain, token rule", "siblings", "bushy siblings"]
)
def test_a_draft_distribution_that_is_empty_here_and_there(case, share, name):
    """What was put there instead is refused, and the distribution is the target's own."""
    drafter, depth, method, vocab = CASES[case]
    setting = Setting.random(vocab, PARAMS[name], seed=4)
    assert error(setting, hollow(drafter, vocab, depth, share), depth, method) < 1e-6


@pytest.mark.parametrize("case", ["chain, block", "chain, token rule", "siblings"])
def test_the_verifier_refuses_what_an_empty_distribution_proposes(case):
    drafter, depth, rule, method = VERIFIED[case]
    setting = Setting.random(3, PARAMS["plain"], seed=3)
    own = hollow(drafter, 3, depth, 2)
    assert verifier_error(setting, own, depth, FixedUniforms(rule), method) < 1e-6


def test_block_accepts_more_than_the_token_rule():
    """Mean tokens of one step, exactly; on average over distributions and never less for any of
    them."""
    gains = []
    for seed in range(5):
        setting = Setting.random(3, PARAMS["plain"], seed=10 * seed)
        token, block = (
            _mean_tokens(setting, step_distribution(setting, sampled_chain(3), 3, method))
            for method in ("siblings", "block")
        )
        gains.append(block - token)
    assert min(gains) > -1e-6 and max(gains) > 1e-3


def _mean_tokens(setting, step):
    emitted = step((0, 1)).tolist()
    widths = [setting.vocab**length for length in range(5)]
    lengths = [length for length, width in enumerate(widths) for _ in range(width)]
    return sum(length * weight for length, weight in zip(lengths, emitted, strict=True))


def test_a_chain_of_siblings_is_the_token_rule():
    """Same acceptance under both labels, so IID chains may share the siblings' code."""
    setting = Setting.random(3, PARAMS["plain"])
    chain = step_distribution(setting, sampled_chain(2), 2, "siblings")
    tree = step_distribution(setting, sampled_tree((1, 1)), 2, "siblings")
    assert chain((0, 1)).equal(tree((0, 1)))


# --- the verifier itself, one uniform in every interval ------------------------------------------

VERIFIED = {
    "none": (empty(), 0, "auto", "match"),
    "point chain": (point_tree((1, 1)), 2, "auto", "match"),
    "point tree": (point_tree((2, 1)), 2, "auto", "match"),
    "dynamic point tree": (dynamic_tree(2, 3), 2, "auto", "match"),
    "chain, block": (sampled_chain(2), 2, "auto", "block"),
    "chain of three, block": (sampled_chain(3), 3, "block", "block"),
    "chain that ends, block": (ending_chain(2, 0.4), 2, "auto", "block"),
    "chain, token rule": (sampled_chain(2), 2, "token", "siblings"),
    "chain, coupled": (sampled_chain(2), 2, "coupled", "match"),
    "siblings": (sampled_tree((2, 1)), 2, "auto", "siblings"),
    "siblings, coupled": (sampled_tree((2,)), 1, "coupled", "match"),
}


ALL_KINDS = ("plain", "top_p", "penalties", "min_tokens", "logits_processors")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, True) for name in ALL_KINDS), ("plain", False), ("top_p", False)],
)
@pytest.mark.parametrize("case", VERIFIED.values(), ids=VERIFIED.keys())
def test_verifier_follows_the_distribution(case, name, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(verifier, "can_use_kernels", lambda *_: False)
    drafter, depth, rule, method = case
    setting = Setting.random(3, PARAMS[name], seed=3)
    assert verifier_error(setting, drafter, depth, FixedUniforms(rule), method) < 1e-6


def test_which_method_decides():
    free, seeded = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)
    ones = rules.torch.full((2, 3), 1 / 3)
    tokens = rules.torch.tensor([0, 1])

    def method(params, draw, rule="auto"):
        tree = TokenTree(tokens, chain_parents(2), draw, ones)
        return rule_for(judged(SequenceState(0, [0], 1, params), 0, tree), rule)

    assert method(free, Draw.IID) == method(free, Draw.IID, "block") == "block"
    assert method(free, Draw.IID, "token") == "siblings"
    assert method(free, Draw.WITHOUT_REPLACEMENT) == "siblings"
    for draw in Draw:
        assert method(free, draw, "coupled") == "match"
        assert method(seeded, draw) == method(SamplingParams(), draw) == "match"
    assert method(free, Draw.POINT) == "match"


def test_harness_sees_a_wrong_distribution():
    """A drafter whose q is not what it draws from must be caught: the check itself works."""
    setting = Setting.random(3, PARAMS["plain"])
    honest = sampled_chain(2)

    def lying(table):
        (drafts,) = honest(table)
        uniform = rules.torch.full_like(drafts.q, 1 / 3)
        return [
            type(drafts)(tree_parents((1, 1)), Draw.IID, drafts.tokens, drafts.weights, 3, uniform)
        ]

    for method in ("siblings", "block"):
        assert error(setting, lying, 2, method) > 1e-3
        distribution = joint_distribution(setting, step_distribution(setting, lying, 2, method), 2)
        assert abs(float(distribution.sum()) - 1) < 1e-6
