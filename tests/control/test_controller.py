"""The adaptive draft length: from acceptance and costs alone."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.control.acceptance import (
    AcceptanceEstimate,
    AcceptanceTracker,
    expected_tokens,
)
from paceline.control.adaptive import AdaptiveController
from paceline.control.controller import Controller, FixedLength
from paceline.control.cost import CostModel
from paceline.core.batch import Commit
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import costs_of
from paceline.model.measure import measure
from support.simulated_time import REST, STEP, Guesser, Machine, always


def seq(seq_id: int = 0) -> SequenceState:
    return SequenceState(seq_id, [1, 2], 2, SamplingParams(max_tokens=500), cached=1)


def costs(slope: float = 0.0) -> TargetCosts:
    """One target step costs 1, plus ``slope`` for each further token."""
    one = CostCurve((1, 101), (1.0, 1.0 + 100 * slope))
    full = CostCurve((1, 101), (1.0 + 7 * slope, 1.0 + (8 * 101 - 1) * slope))
    return TargetCosts((1, 8), (one, full))


def profile(draft: float, longest: int = 8) -> DrafterCosts:
    """Chains; a level costs ``draft``, and nothing takes a pass if that is 0."""
    lengths = tuple(range(longest + 1))
    return DrafterCosts(
        lengths, lengths if draft else (0,) * len(lengths), CostCurve((1,), (draft,))
    )


def controlled(own: DrafterCosts, slope: float = 0.0) -> AdaptiveController:
    return AdaptiveController(CostModel(costs(slope), {"fake": own}))


def adaptive(draft: float = 0.1, slope: float = 0.0, longest: int = 8) -> AdaptiveController:
    return controlled(profile(draft, longest), slope)


def levels(control: AdaptiveController, seqs: Sequence[SequenceState]) -> list[int]:
    return [choice.length for choice in control.lengths(seqs)]


def drive(control: AdaptiveController, accept: float, steps: int, seq_id: int = 0) -> list[int]:
    """Lengths chosen while a share ``accept`` of the drafted levels is accepted, by rotation."""
    chosen = []
    credit = 0.0
    request = seq(seq_id)
    for _ in range(steps):
        (length,) = levels(control, [request])
        chosen.append(length)
        kept = 0
        while kept < length:
            credit += accept
            if credit < 1.0:
                break
            credit -= 1.0
            kept += 1
        reached = kept + (kept < length)
        commit = Commit(seq_id, (1,) * (kept + 1), tuple(range(kept)), length, reached, scheduled=1)
        drafting = control.cost.passes_alone("fake", [length])
        control.observe([commit], control.cost.forward(1, length) + drafting, drafting)
    return chosen


def test_expected_tokens_follow_the_formula() -> None:
    estimate = AcceptanceEstimate([0.5], 4)
    a = 0.5
    assert expected_tokens(estimate.rates()) == pytest.approx(
        [(1 - a ** (g + 1)) / (1 - a) for g in range(5)]
    )


def test_good_drafts_become_long_and_bad_ones_stop() -> None:
    assert drive(adaptive(), 0.95, 60)[-1] >= 6
    assert sum(drive(adaptive(), 0.0, 200)[-40:]) <= 5, "but for a probe"


def test_costly_verification_shortens_drafts() -> None:
    cheap = drive(adaptive(slope=0.0), 0.7, 80)[-1]
    dear = drive(adaptive(slope=0.4), 0.7, 80)[-1]
    assert dear < cheap


def test_a_useless_draft_costs_less_than_three_per_cent() -> None:
    """After the first hundred steps, with a draft level at a tenth of a target step."""
    chosen = drive(adaptive(), 0.0, 1100)[100:]
    assert sum(0.1 * length for length in chosen) / len(chosen) < 0.03
    assert any(chosen), "it must go on probing"


def test_recovery_after_a_bad_stretch() -> None:
    control = adaptive()
    drive(control, 0.0, 40)
    assert drive(control, 0.95, 400)[-1] >= 3


def test_a_free_draft_is_tried_again_soon() -> None:
    """Nothing but a few nodes is lost by trying: a bad stretch of a text passes."""
    control = adaptive(draft=0.0, slope=0.2)
    drive(control, 0.0, 300)
    chosen = drive(control, 1.0, 60)
    assert any(chosen[:40]) and chosen[-1] >= 5
    useless = drive(adaptive(draft=0.0, slope=0.2), 0.0, 1100)[100:]
    assert sum(0.2 * length for length in useless) / len(useless) < 0.02


def test_a_free_draft_may_be_twice_as_long() -> None:
    def longest(drafter: Guesser) -> int:
        return costs_of(drafter, 8, CostCurve((1,), (0.1,))).max_length

    assert longest(Guesser("lookup", always(1.0))) == 16
    assert longest(Guesser("model", always(1.0), pass_seconds=0.1)) == 8


@pytest.mark.parametrize("pass_seconds", [0.0, 0.2])
def test_nothing_is_much_slower_than_plain_decoding(pass_seconds: float) -> None:
    """Requests of a hundred tokens, of which each has to find out anew."""
    machine = Machine(Guesser("wrong", always(0.0), pass_seconds))
    for seq_id in range(20):
        machine.decode(100, seq_id)
    assert machine.tokens / machine.seconds > 0.97 / (STEP + REST)


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("mistaken", [0.4, 2.0])
def test_wrongly_measured_costs_are_found_out(mistaken: float, parts: bool) -> None:
    """A draft that just pays: half of it is right, and a level takes 0.4 of a step."""
    machine = Machine(Guesser("dear", always(0.5), 0.4), mistaken, parts)
    for seq_id in range(20):
        machine.decode(100, seq_id)
    right = Machine(Guesser("dear", always(0.5), 0.4))
    for seq_id in range(20):
        right.decode(100, seq_id)
    plain = 1 / (STEP + REST)
    assert machine.tokens / machine.seconds > 0.98 * max(plain, right.tokens / right.seconds)


def test_an_estimate_follows_what_all_sequences_show() -> None:
    acceptance = AcceptanceTracker(2)
    before = acceptance.rates(1, "model")
    for _ in range(30):
        acceptance.record(0, "model", 1, 0)
    assert acceptance.rates(1, "model")[0] < before[0]
    for _ in range(4):
        acceptance.record(1, "model", 2, 2)
    assert acceptance.rates(1, "model")[1] > acceptance.of_all("model").rates()[1]


def test_plain_decoding_stands_until_the_budget_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decision in 32 steps; in 8 once something could be explored."""
    control = adaptive(draft=4.0)
    drive(control, 0.0, 100)
    decided: list[float] = []
    decide = AdaptiveController._decide

    def counting(self: AdaptiveController, *args: Any) -> None:
        decided.append(self.budget.seconds)
        decide(self, *args)

    monkeypatch.setattr(AdaptiveController, "_decide", counting)
    for seconds, least, most in ((-1e6, 3, 4), (1e-6, 3, 4), (1e6, 8, 128)):
        decided.clear()
        monkeypatch.setattr(control.budget, "earn", lambda *_: None)
        control.budget.seconds = seconds
        drive(control, 0.0, 96)
        assert least <= len(decided) <= most, (seconds, decided)


@pytest.mark.parametrize("good", [0.8, 0.97])
def test_a_hopeless_sequence_among_good_ones_is_found_out(good: float) -> None:
    acceptance = AcceptanceTracker(4)
    for number in range(400):
        acceptance.record(number % 4, "model", 1, int(number % 100 < 100 * good))
    assert acceptance.rates(9, "model")[0] == pytest.approx(good, abs=0.03)
    for _ in range(40):
        acceptance.record(9, "model", 1, 0)
    assert acceptance.rates(9, "model")[0] < 0.5 < acceptance.rates(0, "model")[0]


def test_a_prior_holds_for_the_levels_beyond_it() -> None:
    assert AcceptanceEstimate((0.5, 0.8), 4).rates() == pytest.approx([0.5, 0.8, 0.8, 0.8])
    estimate = AcceptanceEstimate((0.5, 0.8), 4)
    for _ in range(50):
        estimate.record(1, 0)
    assert estimate.rates()[0] < 0.1 and estimate.rates()[3] < 0.3, "deeper ones follow"


def test_steps_without_a_proposal_teach_nothing_and_cost_nothing() -> None:
    """A lookup that finds something in every fifth step, and is right then."""
    machine = Machine(Guesser("rare", lambda position: 1.0 if position % 5 == 0 else None))
    machine.decode(400)
    assert machine.tokens / machine.seconds > 2 / (STEP + REST)


def test_few_nodes_are_expected_of_one_that_proposes_few() -> None:
    """Verification is dear here: 16 nodes would not pay, the two that come do."""
    lengths = tuple(range(9))
    wide = DrafterCosts(tuple(8 * n for n in lengths), (0,) * 9, CostCurve((1,), (0.0,)))
    control = controlled(wide, slope=0.1)
    request = seq()
    for _ in range(100):
        (length,) = levels(control, [request])
        path = (0,) if length else ()
        commit = Commit(0, (1,) * (1 + len(path)), path, 2 * len(path), len(path), scheduled=1)
        control.observe([commit], 1.0)
    assert levels(control, [request])[0] > 0


def test_a_pass_for_few_must_pay_for_itself() -> None:
    """One of eight sequences drafts well, but a pass costs the same for one as for all."""
    control = adaptive(draft=1.2)
    seqs = [seq(i) for i in range(8)]
    for _ in range(80):
        commits = []
        lengths = levels(control, seqs)
        for request, length in zip(seqs, lengths, strict=True):
            kept = length if request.seq_id == 0 else 0
            reached = min(kept + 1, length)
            path = tuple(range(kept))
            tokens = (1,) * (kept + 1)
            commits.append(Commit(request.seq_id, tokens, path, length, reached, scheduled=1))
        control.observe(commits, 1.0 + 1.2 * max(lengths), 1.2 * max(lengths))
    assert sum(levels(control, seqs)) <= 1


def test_no_sequence_is_slowed_down_by_what_another_gains() -> None:
    """All drafts of one are right, none of the other's are."""
    control = adaptive(draft=0.02, slope=0.3)
    good, bad = seq(1), seq(2)
    seconds = 0.0
    for _ in range(200):
        lengths = levels(control, [good, bad])
        commits = [chain(1, lengths[0], lengths[0]), chain(2, lengths[1], 0)]
        drafting = 0.02 * max(lengths)
        spent = 1.3 + 0.3 * sum(lengths) + drafting
        control.observe(commits, spent, drafting)
        seconds += spent
    assert seconds < 1.04 * 200 * 1.3, "it gained a token a step"


def test_a_batch_of_equals_drafts_alike() -> None:
    """Lengths of their own would cost padding."""
    control = adaptive(draft=0.02, slope=0.05)
    seqs = [seq(i) for i in range(8)]
    dice = random.Random(0)
    seen = []
    for _ in range(200):
        lengths = levels(control, seqs)
        seen.append(len(set(lengths)))
        commits = [chain(i, n, _kept(dice, n, 0.7)) for i, n in enumerate(lengths)]
        drafting = 0.02 * max(lengths)
        padding = 1.0 if len(set(lengths)) == 1 else 1.15
        rest = (1.0 + 0.05 * (7 + sum(lengths))) * padding
        control.observe(commits, rest + drafting, drafting)
    assert sum(kinds == 1 for kinds in seen[50:]) > 100


def _kept(dice: random.Random, length: int, chance: float) -> int:
    return next((level for level in range(length) if dice.random() >= chance), length)


def chain(seq_id: int, length: int, kept: int) -> Commit:
    """A chain of ``length`` of which ``kept`` were right."""
    path = tuple(range(kept))
    return Commit(seq_id, (1,) * (kept + 1), path, length, min(kept + 1, length), scheduled=1)


@pytest.mark.parametrize("truth", [1.0, 2.0])
def test_it_follows_changes_of_load(truth: float) -> None:
    """Each phase within 8 % of the better of plain decoding and the best fixed length.

    ``truth``: what forwards of eight sequences take, relative to what start-up measured.
    """
    control = adaptive(draft=0.05, slope=0.2)
    dice = random.Random(1)

    def seconds(batch: int, lengths: Sequence[int]) -> tuple[float, float]:
        rest = 1.0 + 0.2 * (batch - 1 + sum(lengths))
        padding = 1.0 if len(set(lengths)) == 1 else 1.1
        return rest * padding * (truth if batch == 8 else 1.0), 0.05 * max(lengths)

    def expected(length: int) -> float:
        return (1 - 0.8 ** (length + 1)) / 0.2

    number = 0
    for batch in (1, 8, 1, 8, 1):
        seqs = [seq(number + i) for i in range(batch)]
        number += batch
        tokens = time_spent = 0.0
        for _ in range(400):
            lengths = levels(control, seqs)
            commits = [
                chain(own.seq_id, n, _kept(dice, n, 0.8))
                for own, n in zip(seqs, lengths, strict=True)
            ]
            rest, drafting = seconds(batch, lengths)
            control.observe(commits, rest + drafting, drafting)
            tokens += sum(map(expected, lengths))
            time_spent += rest + drafting
        fixed = max(batch * expected(n) / sum(seconds(batch, [n] * batch)) for n in range(9))
        assert tokens / time_spent > 0.92 * fixed, batch
        for own in seqs:
            control.forget(own.seq_id)


def test_reading_a_prompt_must_be_earned() -> None:
    """A level is worth its pass, but the drafter has not seen the long prompt."""

    def first(prompt: int, remaining: int) -> int:
        reads = dataclasses.replace(profile(0.3), needs_prefill=True)
        control = controlled(reads)
        drive(control, 0.7, 200, seq_id=7)  # it has shown what it is worth
        for _ in range(20):
            control.cost.learn_reading("fake", 0.05 * 4096, 4096)
        params = SamplingParams(max_tokens=remaining)
        request = SequenceState(0, [1] * prompt, prompt, params, cached=prompt - 1)
        (choice,) = control.lengths([request])
        return 0 if choice.reason else choice.length  # exploration is paid for

    assert first(2, 100) > 0 and first(4000, 5000) == 0
    assert first(50, 8) == 0 < first(50, 200), "few tokens to come do not pay for it"


def test_a_head_that_follows_has_read_what_was_prefilled_again() -> None:
    """After a preemption that is the prompt and all of the answer so far."""
    control = controlled(dataclasses.replace(profile(0.3), needs_prefill=True, sees_prompts=True))
    control.cost.learn_reading("fake", 0.05 * 4096, 4096)
    request = seq()
    levels(control, [request])
    request.tokens += [1] * 400
    request.cached = 0
    control.forget(0)
    levels(control, [request])  # the same batch, at once
    assert all(draft.reading_now == 0 for draft in control.draft_options(request, "fake", 1))
    control.forget(0)
    assert not control.learner._read


def test_a_target_step_is_linear_in_the_number_of_sequences() -> None:
    table = costs(slope=0.1)
    assert [table(b, 3) for b in (1, 2, 8)] == pytest.approx([1.2, 1.5, 3.3])


def test_a_length_of_a_request_stands() -> None:
    """Whatever pays; and what it comes to is learnt only as far as it is comparable."""
    control = adaptive(draft=5.0)  # drafting never pays
    own = SequenceState(1, [1, 2], 2, SamplingParams(max_tokens=500, draft_length=12), cached=1)
    none = SequenceState(2, [1, 2], 2, SamplingParams(max_tokens=500, draft_length=0), cached=1)
    for _ in range(20):
        params_list = levels(control, [seq(0), own, none])
        assert params_list[1:] == [12, 0]
        commits = [
            Commit(0, (1,), scheduled=1, position=1),
            Commit(1, (1, 1, 1), (0, 1), drafted=12, levels=12, reached=3, scheduled=1, position=1),
            Commit(2, (1,), scheduled=1, position=1),
        ]
        control.observe(commits, 1.0, 0.5)
    control.forget(1)
    assert levels(control, [seq(0), none])[1] == 0


def test_fixed_length() -> None:
    assert [choice.length for choice in FixedLength(3).lengths([seq(), seq(1)])] == [3, 3]


class _LongerLater(Controller):
    def lengths(self, seqs: Sequence[SequenceState]) -> Sequence[int]:
        return [1 if seq.generated < 4 else 2 for seq in seqs]


def test_a_decision_is_logged_where_it_differs_from_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = LLM("paceline/tiny", draft="ngram", controller=_LongerLater(), log_decisions=True)
    with caplog.at_level(logging.INFO, "paceline.decisions"):
        llm.generate("Once upon a time", SamplingParams(max_tokens=8, ignore_eos=True))
    named = (r.getMessage() for r in caplog.records if r.name == "paceline.decisions")
    first, second = map(json.loads, named)
    assert (first["step"], first["generated"], first["length"]) == (1, 0, 1)
    assert second["step"] > 1 and second["generated"] >= 4 and second["length"] == 2
    assert first["request"] == second["request"] and first["reason"] == ""


def test_cost_curve_is_linear_between_points_and_beyond() -> None:
    curve = CostCurve((1, 5, 9), (1.0, 2.0, 4.0))
    assert [curve(n) for n in (1, 3, 5, 7, 13)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 6.0])


def test_measured_costs_never_fall() -> None:
    """A run that was disturbed is bounded by a larger one that was not."""
    calls: list[int] = []

    def run(count: int) -> None:
        calls.append(count)
        time.sleep({1: 0.003, 2: 0.001, 4: 0.002}[count])

    curve = measure(run, [1, 2, 4], torch.device("cpu"))
    assert curve.tokens == (1, 2, 4)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds[0] == curve.seconds[1] < 0.003
    assert calls[:3] == calls[3:6] == [1, 2, 4], "warm-up, then rounds in turn"
