"""Choosing between drafters keeps the distribution, unless the choice looks at a sampled tree."""

from dataclasses import replace

import pytest
from harness import Drafter, Drafts, Draw, SamplingParams, Setting, error, sampled_chain
from test_mutations import CAUGHT, EXACT

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.batch import Plan, Slice
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, chain_parents
from paceline.draft import hybrid
from paceline.draft.base import LookupDrafter, costs_of

PARAMS = SamplingParams(temperature=1.0)


class Lookup(LookupDrafter):
    """Always proposes the likeliest token, without randomness."""

    name = "lookup"

    def propose_one(self, item):
        return (self.token,), (-1,)


class Sampler:
    """Draws a chain of two and stops after an unlikely first token: its size tells the token."""

    name = "sampler"
    features = ()

    def __init__(self, passes):
        self._passes = passes

    def max_nodes(self, length):
        return length

    def passes(self, length):
        return self._passes * length

    def propose(self, plan):
        (item,) = plan.slices
        stops = float(self.q[0, self.tokens[0]]) < 0.4
        count = min(item.draft_length, 1 if stops else 2)
        draw = Draw.IID if count else Draw.POINT
        return [TokenTree(self.tokens[:count], chain_parents(count), draw, self.q[:count])]


class Looking(hybrid.HybridDrafter):
    """The bug: replaces its sampled draft by another one if it is short."""

    def propose(self, plan):
        (tree,) = super().propose(plan)
        if tree.draw is Draw.IID and len(tree) == 1:
            (item,) = plan.slices
            return self.members[0].propose(Plan((replace(item, draft_length=1),)))
        return [tree]


def chooser(kind: type, passes: int, useless: bool = False) -> Drafter:
    """All the drafts of a hybrid over a lookup and a sampler, chosen between by the controller."""
    seen = set()

    def propose(table):
        (drafts,) = sampled_chain(2)(table)
        found = []
        for row, (tokens, q) in enumerate(zip(drafts.tokens, drafts.q, strict=True)):
            lookup, sampler = Lookup(), Sampler(passes)
            lookup.token, sampler.tokens, sampler.q = int(table[0].argmax()), tokens, q
            drafter = kind([lookup, sampler], "cpu")
            curve = CostCurve((1, 9), (1.0, 1.08))
            cost = CostModel(TargetCosts((1,), (curve,)))
            for member in (lookup, sampler):
                cost.add(member.name, costs_of(member, 2, CostCurve((1,), (0.01,))))
            control = AdaptiveController(cost, {"it": drafter.names}, {"lookup": lookup})
            cost.learn_plain(1, 1.0)  # a plain step has been seen
            for _ in range(20 * useless):
                cost.acceptance.record(0, "sampler", 1, 0, (None, True))
            request = SequenceState(0, [0, 1], 2, PARAMS, cached=1)
            (choice,) = control.lengths([request])
            item = Slice(request.view(), 1, choice.length, True, choice.drafter)
            (tree,) = drafter.propose(Plan((item,)))
            q = None if tree.draw is Draw.POINT else tree.q[None]
            weight = drafts.weights[row : row + 1]
            found.append(Drafts(tree.parents, tree.draw, tree.tokens[None], weight, 3, q))
            seen.add((tree.draw, len(tree)))
        return found

    propose.seen = seen
    return propose


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("method", ["siblings", "block"])
def test_a_hybrid_is_lossless(passes: int, method: str) -> None:
    drafter = chooser(hybrid.HybridDrafter, passes)
    assert error(Setting.random(3, PARAMS), drafter, 2, method) < EXACT
    assert {(Draw.IID, 1), (Draw.IID, 2)} <= drafter.seen  # what would tempt one to look


@pytest.mark.parametrize("method", ["siblings", "block"])
def test_looking_at_a_sampled_draft_is_caught(method: str) -> None:
    drafter = chooser(Looking, 1)
    assert error(Setting.random(3, PARAMS), drafter, 2, method) > CAUGHT
    assert (Draw.POINT, 1) in drafter.seen


def test_a_choice_by_the_past_alone_is_lossless_at_every_state() -> None:
    """Whatever the members' record, the distribution stays: here one of them is known to be
    useless."""
    drafter = chooser(hybrid.HybridDrafter, 1, useless=True)
    assert error(Setting.random(3, PARAMS), drafter, 2, "siblings") < EXACT
    assert drafter.seen == {(Draw.POINT, 1)}
