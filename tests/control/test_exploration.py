"""Drafts that are made to learn: what they may cost, and that nothing locks them out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import count, takewhile
from random import Random

import pytest

from paceline.control.adaptive import AdaptiveController
from paceline.control.controller import Decision
from paceline.control.cost import CostModel
from paceline.control.learning import ExplorationBudget
from paceline.core.batch import Commit, Slice
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDraft, LookupDrafter, Proposal
from paceline.draft.hybrid import HybridDrafter
from support.simulated_batch import Batches, Truth, steady
from support.simulated_time import REST, STEP, TOKEN, Guesser, Machine, always, costs

LENGTHS = tuple(range(9))
PLAIN = 1 / (STEP + REST)


def seq(number: int = 0) -> SequenceState:
    return SequenceState(number, [1, 2], 2, SamplingParams(max_tokens=500), cached=1)


def test_the_budget_is_a_share_of_the_time_and_bounded_both_ways() -> None:
    budget = ExplorationBudget()
    for _ in range(10_000):
        budget.earn(1.0, 1.0)
    assert budget.seconds == ExplorationBudget.MOST
    budget.spend(300.0)
    assert budget.seconds >= -ExplorationBudget.SHARE, "a second later it is there again"


def test_a_member_that_must_read_first_is_charged_for_it() -> None:
    reads = DrafterCosts(LENGTHS, LENGTHS, CostCurve((1, 1024), (0.2, 10.43)), needs_prefill=True)
    control = AdaptiveController(CostModel(costs(), {"model": reads}))
    request = SequenceState(0, [1] * 400, 400, SamplingParams(max_tokens=100), cached=399)
    fresh = control.draft_options(request, "model", 1)
    control.observe([Commit(0, (1,), scheduled=400)], 1.0)  # it follows no prompt: still unread
    assert control.draft_options(request, "model", 1)[3] == fresh[3]
    control.learner.tokens_read(request)["model"] = 400
    known = control.draft_options(request, "model", 1)
    assert fresh[3].seconds - known[3].seconds == pytest.approx(fresh[3].reading)
    assert fresh[3].reading > 0 == known[3].reading


class Sure(Guesser):
    """Says how long its match was."""

    match = 1

    def propose_one(self, item: Slice) -> Proposal:
        tokens, parents = super().propose_one(item)
        return tokens, parents, self.match


@pytest.mark.parametrize("token", [0.02, 0.06, 0.12])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_look_up_is_judged_by_the_length_of_its_match(
    hybrid: bool, token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short matches were wrong for 40 requests; then comes an answer that it knows whole."""
    monkeypatch.setattr("support.simulated_time.TOKEN", token)
    suffix = Sure("suffix", always(0.1))
    machine = Machine(HybridDrafter([suffix], "cpu") if hybrid else suffix)
    for number in range(40):
        machine.decode(64, number)
    suffix.chance, suffix.match = always(1.0), 32
    first = machine.decode(64, 100) / PLAIN
    longest = 17 / ((STEP + REST + 16 * token) / (STEP + REST))
    assert first > 0.6 * longest


def test_members_in_vain_lock_nobody_out() -> None:
    """The two states: n-gram finds little, the head has nothing won yet, hiccups come; the suffix
    memory drafts a repeated answer all the same, in each of 20 fresh processes."""
    speeds = []
    for seed in range(20):
        ngram = Sure("ngram", always(0.15), seed=seed)
        suffix = Sure("suffix", lambda position: None)
        head = Guesser("head", always(0.3), 0.3, seed=seed)
        machine = Machine(HybridDrafter([suffix, ngram, head], "cpu"))
        machine.hiccups = {seed % 7: 0.3 / 0.012, 3 + seed % 5: 20.0}
        for number in range(3):
            machine.decode(96, number)
        suffix.chance, suffix.match = always(1.0), 32
        speeds.append(machine.decode(480, 9) / PLAIN)
    assert min(speeds) > 0.9 * max(speeds) and min(speeds) > 5


@pytest.mark.parametrize("share", [0.001, 0.02, 0.05])
def test_one_look_in_vain_costs_its_time_and_no_more(share: float) -> None:
    """A lookup finds nothing in the first six tokens, then all: the seventh step drafts."""
    lookup = Guesser("lookup", lambda position: None if position <= 6 else 1.0)
    machine = Machine(HybridDrafter([lookup], "cpu"))
    machine.looking = share * (STEP + REST)
    sizes: list[int] = []
    machine.commits = sizes
    machine.decode(64)
    assert next(step for step, size in enumerate(sizes) if size > 1) <= 7


@pytest.mark.parametrize("slow", [0, 1, 5])
def test_a_hiccup_teaches_nothing(slow: int) -> None:
    """300 ms at a step of 12: a good draft model goes on drafting, and from the first request."""
    good = Guesser("model", always(0.85), 0.2)
    machine = Machine(good)
    machine.hiccups = {slow: 25.0, slow + 1: 25.0}
    calm = Machine(Guesser("model", always(0.85), 0.2))
    assert machine.decode(128) > 0.9 * calm.decode(128) > 1.5 * PLAIN


def test_rows_are_all_that_a_useless_look_up_costs() -> None:
    machine = Machine(Guesser("lookup", always(0.0)))
    machine.decode(1000)
    assert machine.tokens / machine.seconds > 0.97 * PLAIN and TOKEN > 0


def test_a_draft_that_ends_early_is_priced_by_the_levels_it_has() -> None:
    """Three levels in the mean, always right: the deepest draft is asked for, whatever it would
    cost if it went on."""
    costs_of = DrafterCosts(LENGTHS, LENGTHS, CostCurve((1,), (0.3,)), stops_early=True)
    control = AdaptiveController(CostModel(costs(), {"model": costs_of}))
    request, asked = seq(), []
    for step in range(80):
        (choice,) = control.lengths([request])
        levels = min(choice.length, 1 + 2 * (step % 3))
        path = tuple(range(levels))
        commit = Commit(0, (1,) * (levels + 1), path, levels, levels, levels, scheduled=1)
        rest = STEP + REST + TOKEN * levels
        control.observe([commit], rest + 0.3 * levels, 0.3 * levels)
        asked.append(choice.length)
    assert min(asked[40:]) >= 5
    with_all = control.draft_options(request, "model", 1)[-1]
    assert with_all.seconds < STEP + REST + 8 * TOKEN + 0.3 * 6


def test_drafts_that_end_early_are_longer_where_they_are_right() -> None:
    """Two sequences take turns: of the one six levels are drafted and right, of the other two, of
    which one is."""
    costs_of = DrafterCosts(LENGTHS, LENGTHS, CostCurve((1,), (0.3,)), stops_early=True)
    control = AdaptiveController(CostModel(costs(), {"model": costs_of}))
    requests, levels_of = (seq(0), seq(1)), (6, 2)
    for step in range(300):
        number = step % 2
        (choice,) = control.lengths([requests[number]])
        levels = min(choice.length, levels_of[number])
        path = tuple(range(min(levels, 1 if number else 6)))
        commit = Commit(number, (1,) * (len(path) + 1), path, levels, levels, levels, scheduled=1)
        control.observe([commit], STEP + REST + 0.3 * levels, 0.3 * levels)
    long, short = (control.draft_options(request, "model", 1)[-1].seconds for request in requests)
    assert 0.3 * 2 < long - short < 0.3 * 5  # alike before, with four levels between them


def test_a_tree_that_ends_early_and_leaves_out_nodes_is_priced_by_what_it_has() -> None:
    """Four nodes a level at most, of which half are verified, in three levels in the mean."""
    nodes = tuple(4 * length for length in LENGTHS)
    costs_of = DrafterCosts(nodes, LENGTHS, CostCurve((1,), (0.3,)), stops_early=True)
    cost = CostModel(costs(), {"head": costs_of})
    control, request, taken = AdaptiveController(cost), seq(), []
    for step in range(200):
        (choice,) = control.lengths([request])
        levels = min(choice.length, 1 + 2 * (step % 3))
        path = tuple(range(levels))
        commit = Commit(0, (1,) * (levels + 1), path, 2 * levels, levels, levels, scheduled=1)
        seconds = STEP + REST + TOKEN * 2 * levels + 0.3 * levels
        control.observe([commit], seconds, 0.3 * levels)
        taken.append(seconds)
    deepest = control.draft_options(request, "head", 1)[-1]
    assert deepest.nodes == pytest.approx(6, rel=0.15)
    mean = sum(taken[-99:]) / 99
    assert deepest.seconds == pytest.approx(mean, rel=0.06)
    assert cost.step(1, [deepest]) == pytest.approx(mean, rel=0.06)


@pytest.mark.parametrize("seed", range(4))
def test_a_plain_step_behind_passes_is_no_measure_of_plain_decoding(seed: int) -> None:
    """Passes drive the target's weights out of the caches: drafting gains by the plain steps in
    between, and loses by plain steps in a row."""
    for chance, least in ((0.3, 0.97), (0.5, 0.96), (0.62, 1.0), (0.9, 1.6)):
        machine = Machine(Guesser("head", always(chance), 0.3, seed=seed))
        machine.colder = 0.3
        speeds = [machine.decode(96, number) / PLAIN for number in range(40)]
        assert sum(speeds) / len(speeds) > least  # 0.96, 0.94, 1.05 and 1.70 before


@pytest.mark.parametrize(("chance", "passes"), [(0.5, 0.3), (0.7, 0.55)])
def test_plain_decoding_is_faster_than_the_plain_steps_between_drafts(
    chance: float, passes: float
) -> None:
    """A plain step behind passes or a prompt takes a third more, and only such ones were measured
    while drafts went on: drafts that gain nothing by plain decoding were held to gain 15 %."""
    speeds = []
    for seed in range(8):
        machine = Machine(Guesser("head", always(chance), passes, seed=seed))
        machine.colder, machine.warming = 0.33, 0.65
        for number in range(12):
            machine.prefill()
            speeds += [machine.decode(96, number) / PLAIN]
    assert statistics.mean(speeds[2:]) > 0.96


def drafts_of(batch: int) -> list[Decision]:
    """The longest draft of each step that has one, from the first request on."""
    machine, seen = Batches(Truth(), steady(0.95), batch, seed=0), []
    decide = machine.control.lengths

    def lengths(seqs: Sequence[SequenceState]) -> Sequence[Decision]:
        choices = decide(seqs)
        seen.append(max(choices, key=lambda choice: choice.length))
        return choices

    machine.control.lengths = lengths  # type: ignore[method-assign]
    machine.wave(96)
    return [choice for choice in seen if choice.length]


def test_drafts_for_several_grow_by_doubling() -> None:
    """However good they are expected to be, and the first is exploration; a lone one is not."""
    first, *later = drafts_of(4)
    assert first.length == 1 and first.reason == "exploration"
    longest = 1
    for choice in later:
        assert choice.length <= 2 * longest
        longest = max(longest, choice.length)
    assert longest >= 4
    alone = drafts_of(1)[0]
    assert alone.length > 1 and not alone.reason


def test_texts_that_are_known_are_drafted_for_several_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight answers that a lookup knows whole waited for the budget: a 64th of a step."""
    monkeypatch.setattr("support.simulated_time.TOKEN", 0.03)
    suffix = Sure("suffix", always(None))
    machine = Machine(suffix)
    machine.together(16, 8)
    suffix.chance, suffix.match = always(1.0), 32
    assert machine.together(96, 8) > 3.2


def learnt(seconds: float) -> AdaptiveController:
    costs_of_target = TargetCosts((1, 64), (CostCurve((1, 101), (1.0, 2.0)),) * 2)
    model = DrafterCosts(LENGTHS, LENGTHS, CostCurve((1,), (seconds,)))
    return AdaptiveController(CostModel(costs_of_target, {"model": model}))


def committed(request: SequenceState, length: int, accepted: int, scheduled: int = 1) -> Commit:
    tokens, position = (1,) * (accepted + 1), len(request.tokens) - 1
    request.tokens.extend(tokens)
    request.cached = len(request.tokens) - 1
    levels = min(length, accepted + 1)
    return Commit(
        request.seq_id, tokens, path=tuple(range(accepted)), drafted=length, levels=length,
        reached=levels, scheduled=scheduled, position=position,
    )  # fmt: skip


def test_the_last_token_of_a_request_is_no_exploration() -> None:
    control, rng = learnt(0.2), Random(1)
    last = []
    for number in range(40):
        request = SequenceState(number, [1, 2], 2, SamplingParams(max_tokens=8), cached=1)
        while request.remaining > 0:
            (decision,) = control.lengths([request])
            if request.remaining == 1:
                last.append(decision.reason)
            length = min(decision.length, request.remaining - 1)
            accepted = sum(takewhile(bool, (rng.random() < 0.8 for _ in range(length))))
            commit = committed(request, length, accepted)
            control.observe([commit], 1 + 0.21 * length, 0.2 * length)
        control.forget(number)
    assert last, "no request ended so"
    assert "exploration" not in last


@pytest.mark.parametrize("begins", [0, 3])
def test_drafts_grow_though_every_step_reads_a_prompt(begins: int) -> None:
    """Its time is no measure, but its drafts were made; no plain step is waited for."""
    control = learnt(0.15)
    requests = [
        SequenceState(n, [1, 2], 2, SamplingParams(max_tokens=10_000), cached=1) for n in range(4)
    ]
    reading = SequenceState(99, [1] * 9999, 9999, SamplingParams(max_tokens=9), cached=0)
    lengths: list[int] = []
    for step in range(60):
        decisions = control.lengths([*requests, reading] if step >= begins else requests)
        lengths = [decision.length for decision in decisions[:4]]
        commits = [committed(r, n, n) for r, n in zip(requests, lengths, strict=True)]
        prompt = [Commit(99, (), scheduled=64, position=64 * step)] if step >= begins else []
        control.observe([*commits, *prompt], 1 + 0.2 * max(lengths), 0.15 * max(lengths))
    assert min(lengths) > 1


def test_a_length_of_one_request_keeps_no_other_from_drafting() -> None:
    """No plain step can be measured beside it."""
    control = learnt(0.001)
    others = [
        SequenceState(n, [1, 2], 2, SamplingParams(max_tokens=10_000), cached=1) for n in range(3)
    ]
    params = SamplingParams(max_tokens=10_000, draft_length=2)
    fixed = SequenceState(9, [1, 2], 2, params, cached=1)
    lengths: list[int] = []
    for _ in range(60):
        lengths = [decision.length for decision in control.lengths([*others, fixed])]
        commits = [committed(r, n, n) for r, n in zip([*others, fixed], lengths, strict=True)]
        control.observe(commits, 1 + 0.002 * max(lengths), 0.001 * max(lengths))
    assert min(lengths[:3]) > 1 and lengths[3] == 2


def test_a_draft_that_is_cut_short_counts_as_it_was_made() -> None:
    """Requests of few tokens, at whose ends drafts that are held have no room: each pass took just
    what start-up measured."""
    control, level = learnt(0.2), 0.2
    for number in range(200):
        request = SequenceState(number, [1, 2], 2, SamplingParams(max_tokens=20), cached=1)
        while request.remaining > 0:
            (decision,) = control.lengths([request])
            length = min(decision.length, request.remaining - 1)
            commit = committed(request, length, length)
            control.observe([commit], 1 + (0.01 + level) * length, level * length)
        control.forget(number)
    for length in (2, 4, 8):
        passes = control.cost.passes_alone("model", [length])
        assert control.cost.drafting(1, {"model": passes}) == pytest.approx(passes, rel=0.04)
    assert control.cost.fill["model"] > 0.97


@pytest.mark.parametrize("batch", [1, 8])
def test_lookups_that_win_less_than_asking_takes_are_asked_in_one_of_some_steps(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question takes a tenth of a step: 0.9 of plain decoding where nothing is found, and
    0.995 if one of 20 steps asks."""
    clock = count(step=0.1 * (STEP + REST))
    monkeypatch.setattr("paceline.control.adaptive.perf_counter", lambda: next(clock))
    lookup = Sure("lookup", always(None))
    machine = Machine(HybridDrafter([lookup], "cpu"))
    asked = 0

    def look(slices: Sequence[Slice]) -> list[LookupDraft | None]:
        nonlocal asked
        asked += 1
        return LookupDrafter.lookup(lookup, slices)

    monkeypatch.setattr(lookup, "lookup", look)
    machine.together(256, batch)
    assert asked < 40
    lookup.chance, lookup.match = always(1.0), 32
    assert machine.together(480, batch) > (3 if batch == 1 else 1.5)


def test_where_one_of_several_ends_a_plain_decision_stands() -> None:
    """Each end of 16 had all others judged and looked up again: 4 ms of a step of 20."""
    machine = Machine(HybridDrafter([Guesser("head", always(0.0), 0.9)], "cpu"))
    machine.together(64, 8)
    controller, judged = machine.controller, 0
    decide = controller._decide

    def counted(*given: object) -> None:
        nonlocal judged
        judged += 1
        decide(*given)  # type: ignore[arg-type]

    controller._decide = counted  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=20 + n) for n in range(8)]
    seqs = [SequenceState(100 + n, [1, 2, 3], 3, params[n]) for n in range(8)]
    while seqs:
        controller.lengths(seqs)
        controller.observe([committed(seq, 0, 0) for seq in seqs], 2.0)
        for seq in [seq for seq in seqs if seq.remaining <= 0]:
            controller.forget(seq.seq_id)
            seqs.remove(seq)
    assert judged <= 8
    back = SequenceState(107, [1, 2, 3], 3, params[7])
    before = judged
    controller.lengths([back])
    assert judged == before + 1


def test_a_repeated_answer_is_looked_up_beside_long_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups found nothing in five answers, so they are asked now and then. A model writes ten
    tokens a step. Then an answer of 56 tokens comes again, in each of ten processes."""
    clock = count()
    monkeypatch.setattr("paceline.control.adaptive.perf_counter", lambda: 0.02 * next(clock))
    monkeypatch.setattr("support.simulated_time.LONGEST", 12)
    for seed in range(10):
        suffix = Sure("suffix", always(0.1))
        model = Guesser("model", always(0.9), 0.3, seed=seed)
        machine = Machine(HybridDrafter([suffix, model], "cpu"))
        first = [machine.decode(60 + 9 * seed, number) for number in range(5)]
        suffix.chance, suffix.match = always(1.0), 32
        assert machine.decode(56, 9) > 3 * max(first)
