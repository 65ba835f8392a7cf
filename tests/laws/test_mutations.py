"""Planted bugs that the law tests must catch: each is a mutation of the real source, or a drafter.

A mutation names the text it replaces, so it fails loudly when the code moves on.
"""

import inspect
from types import ModuleType

import pytest
import torch
from harness import (
    Drafts,
    Draw,
    Fake,
    SamplingParams,
    Setting,
    error,
    point_tree,
    sampled_chain,
    sampled_tree,
)
from verifier_enumeration import FixedUniforms, verifier_error

from paceline.verify import rules, verifier

PLAIN = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.5)
EXACT, CAUGHT = 1e-6, 1e-3


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of the module with one piece of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is not in {module.__name__} exactly once"
    copy = ModuleType(module.__name__ + "_mutated")
    # Dataclasses look their module up by name: keep the real one's.
    copy.__dict__.update(__name__=module.__name__, __file__=module.__file__)
    exec(compile(source.replace(old, new), copy.__name__, "exec"), copy.__dict__)
    return copy


RULES_MUTATIONS = {
    "siblings: residual without clamping": (
        "(target - draft).clamp_(min=0.0)",
        "(target - draft)",
        "siblings",
    ),
    "siblings: residual clamped from the wrong side": (
        "(target - draft).clamp_(min=0.0)",
        "(draft - target).clamp_(min=0.0)",
        "siblings",
    ),
    "siblings: residual without renormalising": (
        "_normalise((target - draft).clamp_(min=0.0), target)",
        "(target - draft).clamp_(min=0.0)",
        "siblings",
    ),
    "siblings: q of drawn tokens not zeroed": (
        "draft = draft.scatter(1, token, 0.0)",
        "draft = draft.clone()",
        "siblings",
    ),
    "siblings: q zeroed but not renormalised": (
        "draft = _normalise(draft, draft)",
        "pass",
        "siblings",
    ),
    "block: residual without clamping": (
        "(before.unsqueeze(1) * target).sub_(q).clamp_(min=0.0)",
        "(before.unsqueeze(1) * target).sub_(q)",
        "block",
    ),
    "block: residual of the token rule": (
        "(before.unsqueeze(1) * target).sub_(q).clamp_(min=0.0)",
        "(target - q).clamp_(min=0.0)",
        "block",
    ),
    "block: prefix not capped at one": (
        "(prefix[-1] * ratio_at_depth).clamp_(max=1.0)",
        "(prefix[-1] * ratio_at_depth)",
        "block",
    ),
    "block: last chance like the others": (
        "torch.where(grid.ends, prefix_probs, chances)",
        "torch.where(grid.ends, chances, chances)",
        "block",
    ),
}


@pytest.mark.parametrize("mutation", RULES_MUTATIONS.values(), ids=RULES_MUTATIONS.keys())
def test_mutated_rules_are_caught(mutation):
    old, new, method = mutation
    setting = Setting.random(3, PLAIN)
    drafter = sampled_chain(3) if method == "block" else sampled_tree((2, 2))
    depth = 3 if method == "block" else 2
    assert error(setting, drafter, depth, method) < EXACT
    assert error(setting, drafter, depth, method, rules=mutated(rules, old, new)) > CAUGHT


VERIFIER_MUTATIONS = {
    "no bonus token": (
        "(*[tokens[i] for i in path], choices[end])",
        "(*[tokens[i] for i in path], *choices[end : len(tokens)])",
    ),
    "bonus from the wrong position": (" choices[end])", " choices[max(end - 1, 0)])"),
    "bonus from the root": (" choices[end])", " choices[0])"),
    "block stops at the first failure": (
        "return walk_last_accepted(parents, accepted)",
        "return walk_first_accepted(parents, accepted)",
    ),
    "decisions of the wrong node": ("accepted[node:end]", "accepted[node:end][::-1]"),
}


@pytest.mark.parametrize("mutation", VERIFIER_MUTATIONS.values(), ids=VERIFIER_MUTATIONS.keys())
def test_mutated_verifier_is_caught(mutation, monkeypatch):
    monkeypatch.setattr(verifier, "can_use_kernels", lambda *_: False)
    setting = Setting.random(3, PLAIN)
    chain = sampled_chain(2)
    assert verifier_error(setting, chain, 2, FixedUniforms("block"), "block") < EXACT
    wrong = mutated(verifier, *mutation)

    class WrongFixedUniforms(FixedUniforms, wrong.Verifier):
        _verdicts, _verdict = wrong.Verifier._verdicts, wrong.Verifier._verdict
        _path = wrong.Verifier._path

    assert verifier_error(setting, chain, 2, WrongFixedUniforms("block"), "block") > CAUGHT


# --- bugs of a drafter ---------------------------------------------------------------------------


def test_argmax_draft_accepted_with_the_softmax_is_caught():
    """The draft was a point mass; its softmax is not the distribution it was drawn from."""
    setting = Setting.random(3, PLAIN)
    chosen = point_tree((1, 1))

    def softmaxed(table):
        (drafts,) = chosen(table)
        q = table[drafts.row_strings[:, :-1]]
        return [Drafts(drafts.parents, Draw.IID, drafts.tokens, drafts.weights, 3, q)]

    assert error(setting, chosen, 2, "match") < EXACT
    for method in ("siblings", "block"):
        assert error(setting, softmaxed, 2, method) > CAUGHT


def test_q_before_temperature_is_caught():
    """Drawn at temperature 0.5, declared as at 1: q must be the distribution after processing."""
    setting = Setting.random(3, COOL)

    def declared_warm(honest):
        def propose(table):
            (d,) = honest(table)
            warm = d.q.sqrt()  # the distribution at twice the temperature, up to its norm
            return [Drafts(d.parents, d.draw, d.tokens, d.weights, 3, warm / warm.sum(-1, True))]

        return propose

    for method, honest in (("siblings", sampled_tree((2, 1))), ("block", sampled_chain(2))):
        assert error(setting, honest, 2, method) < EXACT
        assert error(setting, declared_warm(honest), 2, method) > CAUGHT


def _cut(parents, drafts, keep):
    """The drafts that ``keep`` [B], their first len(parents) nodes only."""
    n = len(parents)
    q = drafts.q[keep][:, :n]
    return Drafts(parents, drafts.draw, drafts.tokens[keep][:, :n], drafts.weights[keep], 3, q)


def _own_chance(drafts, node):
    return drafts.q[:, node].gather(1, drafts.tokens[:, node, None]).squeeze(1)


@pytest.mark.parametrize("method", ["siblings", "block"])
def test_pruning_on_a_sampled_nodes_own_probability_is_caught(method):
    """Dropping the unlikely node biases the output; stopping after it does not."""
    setting = Setting.random(3, PLAIN)
    chain = sampled_chain(2)

    def pruned(table):
        (drafts,) = chain(table)
        unlikely = _own_chance(drafts, 1) < 0.4
        return [_cut((-1, 0), drafts, ~unlikely), _cut((-1,), drafts, unlikely)]

    def stopped(table):
        (drafts,) = chain(table)
        unlikely = _own_chance(drafts, 0) < 0.4
        return [_cut((-1, 0), drafts, ~unlikely), _cut((-1,), drafts, unlikely)]

    assert error(setting, stopped, 2, method) < EXACT
    assert error(setting, pruned, 2, method) > CAUGHT


def test_the_design_pages_example_of_biased_pruning():
    """p = q = (1/2, 1/2); drop every b, and a comes out 3/4."""
    even = Fake(2, 0)
    even.table.zero_()
    setting = Setting(even, even, PLAIN)

    def pruned(table):
        (d,) = sampled_chain(1)(table)
        a = d.tokens[:, 0] == 0
        kept = Drafts((-1,), d.draw, d.tokens[a], d.weights[a], 2, d.q[a])
        nothing = torch.empty(1, 0, dtype=torch.int64)
        return [kept, Drafts((), Draw.POINT, nothing, d.weights[~a], 2)]

    assert error(setting, pruned, 1, "siblings", length=1) == pytest.approx(0.25, abs=1e-6)
