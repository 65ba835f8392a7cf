"""What may be drafted, and that looking for drafts in vain costs next to nothing."""

from __future__ import annotations

import pytest

from paceline.core.batch import Commit
from paceline.core.costs import CostCurve
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.pace.acceptance import AcceptanceEstimate
from paceline.pace.controller import AdaptiveLength
from paceline.pace.cost import CostModel, Profile
from simulated_time import costs

LENGTHS = tuple(range(9))
LOOKUP = Profile(LENGTHS, (0,) * 9, CostCurve((1,), (0.0,)))
MODEL = Profile(LENGTHS, LENGTHS, CostCurve((1,), (0.2,)))


def seq(number: int = 0) -> SequenceState:
    return SequenceState(number, [1, 2], 2, SamplingParams(max_tokens=500), cached=1)


def test_a_dear_member_that_may_not_draft_leaves_the_others_their_lengths() -> None:
    """A model that seems always right, and a look-up whose rows are all that it risks."""
    cost = CostModel(costs(), {"look-up": LOOKUP, "model": MODEL})
    control = AdaptiveLength(cost, {"it": ("look-up", "model")})
    cost.acceptance._all["model"] = AcceptanceEstimate([0.999] * 8, decay=0.998)
    own = [draft for name in cost.drafters for draft in control.drafts(seq(), name, 1)]
    prospect = seq(), [cost.none(1), *own]
    chosen = {}
    for purse in (0.0, 0.1, 10.0):
        control.ledger.purse = purse
        ((draft,), _) = control.rule(1, [prospect])
        chosen[purse] = draft.name, draft.length
    assert chosen[0.0] == (None, 0)
    assert chosen[0.1][0] == "look-up" and chosen[0.1][1] > 2
    assert chosen[10.0] == ("model", 8)


def test_a_member_that_must_read_first_is_charged_for_it() -> None:
    reads = Profile(LENGTHS, LENGTHS, CostCurve((1, 1024), (0.2, 10.43)), reads=True)
    control = AdaptiveLength(CostModel(costs(), {"model": reads}))
    request = SequenceState(0, [1] * 400, 400, SamplingParams(max_tokens=100), cached=399)
    fresh = control.drafts(request, "model", 1)
    control.observe([Commit(0, (1,), scheduled=400)], 1.0)  # it follows no prompt: still unread
    assert control.drafts(request, "model", 1)[3] == fresh[3]
    control._read[0]["model"] = 400
    known = control.drafts(request, "model", 1)
    assert fresh[3].seconds - known[3].seconds == pytest.approx(fresh[3].reading)
    assert fresh[3].reading > 0 == known[3].reading


@pytest.mark.parametrize("look", [0.02, 0.1])
def test_looking_in_vain_takes_a_share_of_the_time(look: float) -> None:
    """Eight at once, a team that finds nothing: from the first step on, and 1 % put by for it."""
    control = AdaptiveLength(CostModel(costs(), {"look-up": LOOKUP}), {"it": ("look-up",)})
    seqs = [seq(number) for number in range(8)]
    looks = 0
    for _ in range(2000):
        spent = look if any(control.lengths(seqs)) else 0.0
        looks += spent > 0
        commits = [Commit(own.seq_id, (1,), scheduled=1, position=1) for own in seqs]
        control.observe(commits, 1.07 + spent, spent)
    assert 0 < looks * look < 0.02 * 2000 * 1.07


@pytest.mark.parametrize("found", [0, 4])
def test_a_disturbed_first_try_does_not_keep_it_from_drafting(found: int) -> None:
    """Another program took the processor in the first step that looked, or drafted."""
    control = AdaptiveLength(CostModel(costs(), {"look-up": LOOKUP}), {"it": ("look-up",)})
    request, tried = seq(), []
    for step in range(100):
        if any(control.lengths([request])):
            tried.append(step)
        first = tried == [step]
        if first and found:
            control.decision.made[0] = control.drafts(request, "look-up", 1)[found - 1]
        drafted = found if first else 0
        commit = Commit(0, (1,), drafted=drafted, levels=drafted, scheduled=1, position=1)
        control.observe([commit], 40.0 if first else 1.0, 39.0 if first and not found else 0.0)
    assert 1 < len(tried) and tried[1] < 40
