"""A hybrid is as fast as its best member, in simulated time; members learn what they must know."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.control.following import LookupFollower
from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter, LookupDraft, LookupDrafter, Proposal, costs_of
from paceline.draft.hybrid import HybridDrafter
from paceline.drafters import DraftModel, Eagle3, Hybrid, NGram, parse_draft
from paceline.errors import ConfigError
from support.simulated_time import (
    REST,
    STEP,
    Chance,
    Guesser,
    Machine,
    always,
    controller_of,
    costs,
    profile,
)

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
    "a useless lookup before a good model": [(always(0.05), 0.0), (always(0.8), 0.1)],
    "a good lookup before a good model": [(always(0.95), 0.0), (always(0.8), 0.1)],
    "a good model before a useless one": [(always(0.8), 0.1), (always(0.05), 0.3)],
    "two of a kind": [(always(0.7), 0.1), (always(0.7), 0.1)],
    "a lookup with bad stretches": [(bursts(0.95, 0.2), 0.0), (always(0.7), 0.1)],
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
    """A lookup by trials, without being used; a model by probes."""
    for pass_seconds in (0.0, 0.1):
        late = Guesser("late", lambda position: 0.02 if position < 200 else 0.95, pass_seconds)
        machine = Machine(HybridDrafter([late], "cpu"))
        assert machine.decode(199) > 0.95 * PLAIN
        late.chance = always(0.95)
        assert machine.decode(300) > 2 * PLAIN


@pytest.mark.parametrize("mistaken", [1.6, 2.5])
def test_a_model_that_start_up_took_for_dear_is_found_beside_another(mistaken: float) -> None:
    """While the one gains, the other, which would gain more, is explored as well."""

    def speed(drafter: Drafter, *mistakes: float) -> float:
        machine = Machine(drafter)
        members = drafter.members if isinstance(drafter, HybridDrafter) else [drafter]
        known = dict(enumerate(map(profile, members, mistakes)))
        control = AdaptiveController(CostModel(costs(), known), {"it": tuple(known)})
        machine.controller = control
        for seq_id in range(5):
            machine.decode(100, seq_id)
        before = machine.tokens, machine.seconds
        for seq_id in range(5, 25):
            machine.decode(100, seq_id)
        return (machine.tokens - before[0]) / (machine.seconds - before[1])

    head, form = (always(0.68), 0.08), (always(0.95), 0.3)
    best = speed(guessers(head, form)[1], 1.0)
    assert speed(hybrid(head, form), 1.0, mistaken) > 0.94 * best


class Sure(Guesser):
    """Right where it is sure, wrong elsewhere, and it says so."""

    def __init__(self) -> None:
        super().__init__("sure", lambda position: 1.0 if position % 4 else 0.0)

    def propose_one(self, item: Slice) -> Proposal:
        tokens, parents = super().propose_one(item)
        return tokens, parents, 8 if len(item.seq.tokens) % 4 else 1


def test_acceptance_is_learnt_for_each_confidence() -> None:
    machine = Machine(HybridDrafter([Sure()], "cpu"))
    machine.decode(1000)
    acceptance = machine.controller.cost.acceptance
    unsure, sure = (acceptance.of_all(0, (match, False)).rates()[0] for match in (1, 8))
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


def part(
    seq_id: int, scheduled: int = 1, length: int = 4, tokens: int = 3, drafter: str | None = None
) -> Slice:
    known = list(range(1, tokens + 1))
    seq = SequenceState(seq_id, known, tokens, SamplingParams(), cached=tokens - max(1, scheduled))
    return Slice(seq.view(), scheduled, length, True, drafter)


def two() -> tuple[Recorder, Recorder, HybridDrafter]:
    lookup = Recorder("lookup", lambda position: 1.0 if position == 3 else None)
    model = Recorder("model", always(1.0), 0.1)
    return lookup, model, HybridDrafter([lookup, model], "cpu")


def test_without_a_choice_the_first_with_a_proposal_drafts() -> None:
    lookup, model, drafter = two()
    trees = drafter.propose(Plan((part(0), part(1, tokens=5))))
    assert [tree.tokens.tolist() for tree in trees] == [[4, 5, 6, 7], [6, 7, 8, 9]]
    assert model.asked == [{0: 0, 1: 4}]
    assert lookup.asked == [{0: 4, 1: 4}]


def test_the_member_that_was_chosen_drafts() -> None:
    lookup, model, drafter = two()
    trees = drafter.propose(Plan((part(0, drafter="model"), part(1, drafter="lookup"))))
    assert [len(tree) for tree in trees] == [4, 4]
    assert model.asked == [{0: 4, 1: 0}] and lookup.asked == [{0: 0, 1: 4}]


def test_what_was_found_is_cut_to_the_length_that_was_chosen() -> None:
    lookup = Recorder("lookup", always(1.0))
    (offer,) = lookup.lookup([part(0, length=8)])
    assert offer is not None and len(offer.tokens) == 8
    (tree,) = lookup.propose(Plan((part(0, length=3),)))
    assert tree.tokens.tolist() == [4, 5, 6]


def test_what_was_cut_has_no_more_nodes_than_there_is_room_for() -> None:
    class Wide(LookupDrafter):
        name = "wide"

        def max_nodes(self, length: int) -> int:
            return length + 1

        def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
            return [5, 6, 7, 8], [-1, -1, -1, 0]

    wide = Wide()
    wide.lookup([part(0, length=3)])
    (tree,) = wide.propose(Plan((part(0, length=1),)))
    assert len(tree) == wide.max_nodes(1)


def test_a_tree_is_cut_by_its_levels() -> None:
    offer = LookupDraft((5, 6, 7, 8), (-1, -1, 0, 2), 4)
    assert list(offer.nodes) == [0, 2, 3, 4]
    assert offer.truncate(1) == ([5, 6], (-1, -1)) and offer.truncate(2) == ([5, 6, 7], (-1, -1, 0))


def test_nothing_is_learnt_from_what_a_grammar_forces() -> None:
    """Two levels are certain, and those behind them never right."""

    class Half(LookupDrafter):
        name = "half"

        def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int], int, int]:
            return [5, 6, 9, 9], [-1, 0, 1, 2], 1, 2

    cost = CostModel(TargetCosts((1,), (CostCurve((1,), (1.0,)),)))
    cost.add("half", costs_of(Half(), 8, CostCurve((1,), (0.0,))))
    follower = LookupFollower({"half": Half()}, cost)
    before = cost.acceptance.of_all("half", (1, False)).rates()
    for seq_id in range(1, 20):
        seqs = [SequenceState(seq_id, [1, 2], 2, SamplingParams(max_tokens=90), cached=1)]
        offers = follower.lookup(seqs, lambda seq: ["half"], False)
        assert offers is not None and offers[seq_id]["half"].forced_levels == 2
        seqs[0].tokens += [5, 6, 7]
        follower.forget(seq_id)
    after = cost.acceptance.of_all("half", (1, False)).rates()
    assert after[0] < 0.2 < before[0]


def test_a_model_behind_forced_text_learns_of_the_rest_alone() -> None:
    """Its first two levels are certain, which makes it worth asking, and the third never right."""

    class Forcing:
        def forced_tokens(self, path: tuple[int, ...] = ()) -> Sequence[int]:
            return (5, 6)

    model = Guesser("model", always(1.0), 0.1)
    model.max_forced_tokens = 8
    controller = controller_of(model)
    acceptance, lengths = controller.cost.acceptance.of_all(0), list[int]()
    before = acceptance.rates()[0]
    for seq_id in range(1, 30):
        seq = SequenceState(seq_id, [1, 2], 2, SamplingParams(max_tokens=90), cached=1)
        seq.constraint = Forcing()  # type: ignore[assignment]
        (choice,) = controller.lengths([seq])
        lengths.append(levels := choice.length)
        path = (0, 1)[:levels]
        counts = {"drafted": levels, "levels": levels, "reached": min(3, levels), "scheduled": 1}
        commit = Commit(seq_id, (5, 6, 7)[: len(path) + 1], path, **counts)
        controller.observe([commit], STEP + REST + 0.1 * levels, 0.1 * levels)
        controller.forget(seq_id)
    assert sum(length >= 2 for length in lengths) > 20
    assert acceptance.rates()[0] <= before


@pytest.mark.parametrize("batch", [1, 8])
def test_a_length_of_a_request_stands(batch: int) -> None:
    """Whatever it costs, and whatever its neighbours' is; by whom it is worth most."""
    machine = Machine(
        HybridDrafter([Guesser("lookup", always(1.0)), Guesser("m", always(1), 9)], "cpu")
    )
    control = machine.controller
    machine.guessers[0].text = list(range(1, 99))  # type: ignore[attr-defined]
    for name, match, right in ((0, 0, 0), (1, None, 8)):
        for _ in range(40):  # the lookup is never right, and the model is dear
            control.cost.acceptance.record(0, name, 8, right, (match, False))
    given = SamplingParams(draft_length=8, max_tokens=90)
    own = SequenceState(0, [1, 2, 3], 3, given, cached=2)
    others = [
        SequenceState(n, [1, 2, 3], 3, SamplingParams(max_tokens=90), cached=2)
        for n in range(1, batch)
    ]
    control.lengths([own, *others])  # the first step is measured
    assert control.lengths([own, *others])[0].length == 8


def test_prefill_chunks_reach_every_member() -> None:
    lookup, model, drafter = two()
    seq = SequenceState(7, [1, 2, 3, 4, 5, 6], 6, SamplingParams())
    trees = drafter.propose(Plan((Slice(seq.view(), 3, 0),)))
    assert [len(tree) for tree in trees] == [0]
    assert model.asked == [{7: 0}] and lookup.asked == [{7: 0}]


def test_forget_reaches_every_member() -> None:
    lookup, model, drafter = two()
    drafter.propose(Plan((part(5),)))
    drafter.observe([Commit(5, (4, 0), (0,), 4, 2, scheduled=1)], ModelOutput(None))  # type: ignore[arg-type]
    drafter.forget(5)
    assert lookup.forgotten == model.forgotten == [5]


def test_features_are_those_of_all_members() -> None:
    first, second = Recorder("a", always(None)), Recorder("b", always(None))
    first.features, second.features = (2, 7), (1, 7)
    assert HybridDrafter([first, second], "cpu").features == (1, 2, 7)


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
