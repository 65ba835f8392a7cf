"""The adaptive draft length: from acceptance and costs alone."""

from __future__ import annotations

import pytest

from paceline.core.batch import Commit
from paceline.core.costs import CostCurve, StepCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft.worth import AcceptanceEstimate, Profile, StepTime
from paceline.engine.controller import AdaptiveLength, FixedLength


def seq(seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, [1, 2], 2, SamplingParams(max_tokens=500), cached=1)


def costs(slope: float = 0.0) -> StepCosts:
    """One target step costs 1, plus ``slope`` for each further token."""
    one = CostCurve((1, 101), (1.0, 1.0 + 100 * slope))
    full = CostCurve((1, 101), (1.0 + 7 * slope, 1.0 + (8 * 101 - 1) * slope))
    return StepCosts(one, full, 8)


def profile(draft: float, longest: int = 8) -> Profile:
    """Chains; a level costs ``draft``, and nothing takes a pass if that is 0."""
    lengths = tuple(range(longest + 1))
    return Profile(lengths, lengths if draft else (0,) * len(lengths), CostCurve((1,), (draft,)))


def adaptive(draft: float = 0.1, slope: float = 0.0, longest: int = 8) -> AdaptiveLength:
    return AdaptiveLength(StepTime(costs(slope)), {"fake": profile(draft, longest)})


def drive(control: AdaptiveLength, accept: float, steps: int, seq_id: int = 0) -> list[int]:
    """Lengths chosen while a share ``accept`` of the drafted levels is accepted, by rotation."""
    chosen = []
    credit = 0.0
    request = seq(seq_id)
    for _ in range(steps):
        (length,) = control.lengths([request])
        chosen.append(length)
        kept = 0
        while kept < length:
            credit += accept
            if credit < 1.0:
                break
            credit -= 1.0
            kept += 1
        reached = kept + (kept < length)
        commit = Commit(seq_id, (1,) * (kept + 1), tuple(range(kept)), length, reached, fed=1)
        control.observe([commit], 1.0)
    return chosen


def test_expected_tokens_follow_the_formula() -> None:
    estimate = AcceptanceEstimate([0.5] * 4, decay=0.9)
    a = 0.5
    assert estimate.expected_tokens() == pytest.approx(
        [(1 - a ** (g + 1)) / (1 - a) for g in range(5)]
    )


def test_good_drafts_become_long_and_bad_ones_stop() -> None:
    assert drive(adaptive(), 0.95, 60)[-1] >= 6
    assert drive(adaptive(), 0.0, 60)[-1] == 0


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


def test_sequences_of_a_batch_get_their_own_lengths() -> None:
    control = adaptive(draft=0.02, slope=0.1)
    good, bad = seq(1), seq(2)
    for _ in range(80):
        lengths = control.lengths([good, bad])
        commits = []
        for request, length, right in ((good, lengths[0], True), (bad, lengths[1], False)):
            kept = length if right else 0
            reached = kept + (kept < length)
            path = tuple(range(kept))
            commits.append(Commit(request.seq_id, (1,) * (kept + 1), path, length, reached, fed=1))
        control.observe(commits, 1.0)
    lengths = control.lengths([good, bad])
    assert lengths[0] > lengths[1]


def test_a_target_step_is_linear_in_the_number_of_sequences() -> None:
    table = costs(slope=0.1)
    assert [table.target(b, 3) for b in (1, 2, 8)] == pytest.approx([1.2, 1.5, 3.3])


def test_fixed_length() -> None:
    assert FixedLength(3).lengths([seq(), seq(1)]) == [3, 3]


def test_cost_curve_is_linear_between_points_and_beyond() -> None:
    curve = CostCurve((1, 5, 9), (1.0, 2.0, 4.0))
    assert [curve(n) for n in (1, 3, 5, 7, 13)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 6.0])
