"""Choosing between drafters leaves the distribution alone, as long as no sampled tree is looked
at."""

from types import ModuleType

import pytest
from harness import Drafter, Drafts, Draw, SamplingParams, Setting, error, sampled_chain
from test_mutations import CAUGHT, EXACT, mutated

from paceline.core.batch import Plan, Slice
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, chain_parents
from paceline.pace import hybrid
from paceline.pace.controller import AdaptiveLength
from paceline.pace.cost import CostModel, Profile

PARAMS = SamplingParams(temperature=1.0)


class Lookup:
    """Always proposes one token, the likeliest: chosen without chance."""

    name = "lookup"
    features = ()

    def max_nodes(self, length):
        return min(length, 1)

    def passes(self, length):
        return 0

    def propose(self, plan):
        (item,) = plan.slices
        return [TokenTree.chain([self.token] if item.draft_length else [])]


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
    """Drops what it has drawn if that is short, for something else: the bug."""

    def _draft(self, plan, found, picks):
        (tree,) = super()._draft(plan, found, picks)
        return [found[0][0] if tree.draw is Draw.IID and len(tree) == 1 else tree]


def chooser(kind: type, passes: int) -> Drafter:
    """All the drafts of a hybrid over a lookup and a sampler.

    Hopes are the same for both, so the longer draft is worth more, and of equals the lookup's.
    """
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
            for name, member in enumerate((lookup, sampler)):
                cost.add(name, Profile.of(member, 2, CostCurve((1,), (0.01,))))
            names = tuple(cost.drafters)
            control = AdaptiveLength(cost, {"it": names})
            control.ledger.purse = 100.0  # anything may be risked
            drafter.calibrate(control, names)
            request = SequenceState(0, [0, 1], 2, PARAMS, cached=1)
            (tree,) = drafter.propose(Plan((Slice(request, 1, 2),)))
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


def test_judging_a_sampled_proposal_by_its_size_is_caught() -> None:
    """The guard in the real source, taken out."""
    guard = "if tree.draw is not Draw.POINT:"
    careless: ModuleType = mutated(hybrid, guard, "if False:")
    setting = Setting.random(3, PARAMS)
    assert error(setting, chooser(careless.HybridDrafter, 0), 2, "siblings") > CAUGHT


def test_a_choice_by_the_past_alone_is_lossless_at_every_state() -> None:
    """Whatever the members' record, the distribution stays: here one of them is known to be
    useless."""

    class Experienced(hybrid.HybridDrafter):
        def calibrate(self, control, names):
            super().calibrate(control, names)
            for _ in range(20):
                control.cost.acceptance.record(0, names[1], 1, 0)

    drafter = chooser(Experienced, 1)
    assert error(Setting.random(3, PARAMS), drafter, 2, "siblings") < EXACT
    assert drafter.seen == {(Draw.POINT, 1)}
