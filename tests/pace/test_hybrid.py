"""A hybrid is as fast as its best member, in simulated time; members learn what they must know."""

from __future__ import annotations

import pytest

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.drafters import DraftModel, Eagle3, Hybrid, NGram, parse_draft
from paceline.errors import ConfigError
from paceline.pace.hybrid import HybridDrafter
from simulated_time import REST, STEP, Chance, Guesser, Machine, always, calibrated

PLAIN = 1 / (STEP + REST)  # tokens a second

Member = tuple[Chance, float]  # how often it is right, and the seconds of a pass


def bursts(inside: float | None, outside: float | None) -> Chance:
    """Good for 20 tokens in every 60, as where a text repeats itself."""
    return lambda position: inside if position % 60 < 20 else outside


def guessers(*members: Member) -> list[Guesser]:
    return [Guesser(str(i), *member, seed=i) for i, member in enumerate(members)]


def speed(drafter: Drafter, sequences: int = 30) -> float:
    """Tokens a second relative to plain decoding, over sequences of 100 tokens."""
    machine = Machine(drafter)
    for seq_id in range(sequences):
        machine.decode(100, seq_id)
    return machine.tokens / machine.seconds / PLAIN


def hybrid(*members: Member) -> HybridDrafter:
    return HybridDrafter(guessers(*members), "cpu")


TEAMS: dict[str, list[Member]] = {
    "a useless look-up before a good model": [(always(0.05), 0.0), (always(0.8), 0.1)],
    "a good look-up before a good model": [(always(0.95), 0.0), (always(0.8), 0.1)],
    "a good model before a useless one": [(always(0.8), 0.1), (always(0.05), 0.3)],
    "two of a kind": [(always(0.7), 0.1), (always(0.7), 0.1)],
    "a look-up with bad stretches": [(bursts(0.95, 0.2), 0.0), (always(0.7), 0.1)],
    "all useless": [(always(0.02), 0.0), (always(0.02), 0.0), (always(0.02), 0.3)],
}


@pytest.mark.parametrize("team", TEAMS.values(), ids=TEAMS.keys())
def test_as_fast_as_its_best_member(team: list[Member]) -> None:
    alone = [speed(guesser) for guesser in guessers(*team)]
    assert speed(hybrid(*team)) > 0.97 * max(1.0, *alone)


def test_faster_than_any_member_where_they_complement_each_other() -> None:
    team: list[Member] = [(bursts(0.95, None), 0.0), (always(0.7), 0.1)]
    alone = [speed(guesser) for guesser in guessers(*team)]
    assert speed(hybrid(*team)) > 1.3 * max(alone)


def test_a_member_is_dropped_where_it_costs_too_much() -> None:
    """Often right, but half a target step for each token: plain decoding is faster."""
    member: Member = (always(0.6), 0.9)
    assert speed(hybrid((always(None), 0.0), member)) > 0.97


def test_a_member_that_turns_good_is_found_out() -> None:
    """A look-up by trials, without being used; a model by probes."""
    for pass_seconds in (0.0, 0.1):
        late = Guesser("late", lambda position: 0.02 if position < 200 else 0.95, pass_seconds)
        machine = Machine(HybridDrafter([late], "cpu"))
        assert machine.decode(199) > 0.95 * PLAIN
        late.chance = always(0.95)
        assert machine.decode(300) > 2 * PLAIN


class Sure(Guesser):
    """Right where it is sure, wrong elsewhere, and it says so."""

    def __init__(self) -> None:
        super().__init__("sure", lambda position: 1.0 if position % 4 else 0.0)
        self._position = 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        self._position = len(plan.slices[0].seq.tokens)
        return super().propose(plan)

    def confidence(self, seq_id: int) -> int:
        return 1 if self._position % 4 else 0


def test_acceptance_is_learnt_for_each_confidence() -> None:
    machine = Machine(HybridDrafter([Sure()], "cpu"))
    machine.decode(1000)
    acceptance = machine.controller.cost.acceptance
    unsure, sure = (acceptance.of(9, (0, kind)).rates()[0] for kind in (0, 1))
    assert unsure < 0.2 and sure > 0.9


# --- what members see ----------------------------------------------------------------------------


class Recorder(Guesser):
    """Remembers the draft lengths it was asked for, by sequence."""

    def __init__(self, name: str, chance: Chance, pass_seconds: float = 0.0) -> None:
        super().__init__(name, chance, pass_seconds)
        self.text = list(range(1, 99))
        self.asked: list[dict[int, int]] = []
        self.forgotten: list[int] = []

    def propose(self, plan: Plan) -> list[TokenTree]:
        self.asked.append({item.seq.seq_id: item.draft_length for item in plan.slices})
        return super().propose(plan)

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def part(seq_id: int, feed: int = 1, length: int = 4, tokens: int = 3) -> Slice:
    known = list(range(1, tokens + 1))
    seq = SequenceState(seq_id, known, tokens, SamplingParams(), cached=tokens - max(1, feed))
    return Slice(seq, feed, length)


def test_without_costs_the_first_with_a_proposal_drafts() -> None:
    lookup = Recorder("lookup", lambda position: 1.0 if position == 3 else None)
    model = Recorder("model", always(1.0), 0.1)
    drafter = HybridDrafter([lookup, model], "cpu")
    found, missing = part(0), part(1, tokens=5)
    trees = drafter.propose(Plan((found, missing)))
    assert [tree.tokens.tolist() for tree in trees] == [[4, 5, 6, 7], [6, 7, 8, 9]]
    assert model.asked == [{0: 0, 1: 4}]
    assert lookup.asked == [{0: 4, 1: 4}]


def test_a_model_before_a_look_up_goes_first_without_costs() -> None:
    lookup, model = Recorder("lookup", always(1.0)), Recorder("model", always(1.0), 0.1)
    (tree,) = HybridDrafter([model, lookup], "cpu").propose(Plan((part(0),)))
    assert len(tree) == 4
    assert model.asked == [{0: 4}]
    assert lookup.asked == [{0: 4}, {0: 0}], "what was not taken is withdrawn"


def test_a_proposal_that_is_not_worth_its_length_is_asked_for_again() -> None:
    lookup = Recorder("lookup", always(1.0))
    drafter = HybridDrafter([lookup], "cpu")
    control = calibrated(drafter)
    control.ledger.purse = 100.0  # anything may be risked
    for _ in range(40):  # known: the first token is right, the rest is not
        control.cost.acceptance.record(0, 0, 2, 1)
    (tree,) = drafter.propose(Plan((part(0, length=8),)))
    assert lookup.asked[0] == {0: 8}
    assert 0 < lookup.asked[1][0] == len(tree) < 8


@pytest.mark.parametrize("batch", [1, 8])
def test_a_length_of_a_request_stands(batch: int) -> None:
    """Whatever it costs, and whatever its neighbours' is."""
    lookup, model = Recorder("lookup", always(1.0)), Recorder("model", always(1.0), 9.0)
    drafter = HybridDrafter([lookup, model], "cpu")
    control = calibrated(drafter)
    for name, right in ((0, 0), (1, 8)):
        for _ in range(40):  # the look-up is never right, and the model is dear
            control.cost.acceptance.record(0, name, 8, right)
    own = SequenceState(0, [1, 2, 3], 3, SamplingParams(draft_length=8), cached=2)
    plan = Plan((Slice(own, 1, 8), *(part(n, length=0) for n in range(1, batch))))
    assert [len(tree) for tree in drafter.propose(plan)] == [8, *[0] * (batch - 1)]


def test_prefill_chunks_reach_every_member() -> None:
    lookup, model = Recorder("lookup", always(1.0)), Recorder("model", always(1.0), 0.1)
    drafter = HybridDrafter([lookup, model], "cpu")
    seq = SequenceState(7, [1, 2, 3, 4, 5, 6], 6, SamplingParams())
    trees = drafter.propose(Plan((Slice(seq, 3, 0),)))
    assert [len(tree) for tree in trees] == [0]
    assert model.asked == [{7: 0}] and lookup.asked == [{7: 0}]


def test_forget_reaches_every_member() -> None:
    """What the controller knows is the engine's to drop, whatever drafts."""
    lookup, model = Recorder("lookup", always(1.0)), Recorder("model", always(1.0), 0.1)
    drafter = HybridDrafter([lookup, model], "cpu")
    control = calibrated(drafter)
    drafter.propose(Plan((part(5),)))
    drafter.observe([Commit(5, (4, 0), (0,), 4, 2, scheduled=1)], ModelOutput(None))  # type: ignore[arg-type]
    drafter.forget(5)
    assert lookup.forgotten == model.forgotten == [5]
    assert not drafter._trials and control.cost.acceptance._each
    control.forget(5)
    assert not control.cost.acceptance._each


def test_features_are_those_of_all_members() -> None:
    first, second = Recorder("a", always(None)), Recorder("b", always(None))
    first.features, second.features = (2, 7), (1, 7)
    assert HybridDrafter([first, second], "cpu").features == (1, 2, 7)


def test_a_pass_for_few_must_pay_for_itself() -> None:
    """A pass costs the same for one sequence as for eight; here it is good for one of them."""
    model = Recorder("model", always(1.0), 0.5)
    drafter = HybridDrafter([model], "cpu")
    control = calibrated(drafter)
    for batch in (1, 8):  # what it has won covers anything
        control.ledger.settle({0: 1}, dict.fromkeys(range(batch), 99), 0.0, 1.0)
    everyone = Plan(tuple(part(i) for i in range(8)))
    assert sum(len(tree) > 0 for tree in drafter.propose(everyone)) == 8
    for _ in range(40):
        for seq_id in range(8):
            control.cost.acceptance.record(seq_id, 0, 4, 4 if seq_id == 0 else 0)
    (alone,) = drafter.propose(Plan((part(0),)))
    assert len(alone) > 0
    assert sum(len(tree) for tree in drafter.propose(everyone)) == 0


# --- specs ---------------------------------------------------------------------------------------


def test_members_of_a_spec() -> None:
    text = "hybrid:ngram:min=2+eagle3:a+b/head,nodes=8+model:draft"
    spec = parse_draft(text)
    assert spec == Hybrid(NGram(min=2), Eagle3("a+b/head", nodes=8), DraftModel("draft"))
    assert str(spec) == text and len(spec.members()) == 3


@pytest.mark.parametrize("text", ["hybrid", "hybrid:", "hybrid:none+ngram", "hybrid:some/path"])
def test_a_spec_without_known_members_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="begins with no known kind; join members with"):
        parse_draft(text)
