"""The ten seconds of measuring: its arithmetic on made-up steps, and a short run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from paceline.engine.clock import PHASES
from paceline.engine.driver import StepSums
from paceline.lab.doctor import report
from paceline.lab.doctor.findings import Severity
from paceline.lab.doctor.trial import LONG, SpeedupTrial, judge, run_trial
from support.tiny_models import TinyPair


def decoded(
    steps: int,
    drafted: int,
    accepted: tuple[int, ...] = (),
    reached: tuple[int, ...] = (),
    **seconds: float,
) -> StepSums:
    """``seconds`` of each phase in ONE step."""
    times = {phase: steps * seconds.get(phase, 0.0) for phase in PHASES}
    tokens, nodes = steps + sum(accepted), steps * drafted
    return StepSums(steps, steps, tokens, nodes, sum(accepted), reached, accepted, times)


# 100 steps; half of the first tokens, and half of what follows each, is right.
HALVES = (50, 25, 12, 6, 3, 1, 1, 0)
EXPLORED = SpeedupTrial(
    plain=decoded(100, 0, target=0.010, other=0.001),
    long=decoded(
        100, 8, HALVES, (100, *HALVES[:-1]), draft=0.008, target=0.014, verify=0.001, other=0.001
    ),
    passes=tuple(range(LONG + 1)),
    nodes=tuple(range(LONG + 1)),
)
DRAFTER = "drafter"  # its name in the cost model


def test_figures_of_a_chain() -> None:
    assert EXPLORED.acceptance_rate == pytest.approx(98 / 198)
    assert EXPLORED.long.rates[:2] == (0.5, 0.5)
    assert EXPLORED.draft_cost_ratio == pytest.approx(0.1)
    target = EXPLORED.by_rows("target")
    assert target.tokens == (1, 9)
    assert (target(1), target(5)) == pytest.approx((0.010, 0.012))
    assert EXPLORED.cost.tokens(DRAFTER, 2) == pytest.approx(1.75)
    # Two passes of 1 ms, and three rows: 11 ms for one, 16 for nine.
    step = EXPLORED.cost.table(DRAFTER, 1)[2]
    assert step == pytest.approx(0.002 + 0.011 + 0.005 / 4)
    assert EXPLORED.predicted_speedup_by_length[1] == pytest.approx(1.75 * 0.011 / step)
    assert EXPLORED.best_draft_length == 2


def test_drafts_that_are_looked_up() -> None:
    """Half of the drafts find nothing; there is no pass to be paid."""
    looked_up = replace(
        EXPLORED,
        long=decoded(100, 4, (40, 40), (50, 40), draft=0.001, target=0.012),
        passes=(0,) * (LONG + 1),
    )
    assert looked_up.draft_cost_ratio is None
    assert looked_up.cost.tokens(DRAFTER, LONG) == pytest.approx(1.8)
    # Eight levels come to four nodes, as they did: five rows, and the looking.
    assert looked_up.cost.table(DRAFTER, 1)[LONG] == pytest.approx(0.013)
    assert looked_up.best_draft_length == 2


def test_drafts_that_were_cut_short_cost_what_they_are() -> None:
    """Half of the steps had room for two tokens only."""
    half = decoded(
        100, 2, (50, 25), (100, 50), draft=0.002, target=0.011, verify=0.001, other=0.001
    )
    mixed = replace(EXPLORED, long=EXPLORED.long + half)
    assert mixed.draft_cost_ratio == pytest.approx(0.1)
    assert mixed.cost.tokens(DRAFTER, 2) == pytest.approx(1.75)


def trial(measured: float, explored: SpeedupTrial = EXPLORED) -> SpeedupTrial:
    return replace(explored, measured_speedup=measured, seconds=10.0)


def judged(measured: float, explored: SpeedupTrial = EXPLORED) -> list[str]:
    """Codes of the verdict, whether the machine was busy or not."""
    found = judge(trial(measured, explored))
    return [item.code for item in found if item.code != "measurement-unsure"]


def test_verdicts() -> None:
    assert judged(1.3) == ["worth-it"]
    assert judged(1.05) == ["barely-worth-it"]
    assert judged(0.9) == ["not-worth-it"]
    found = next(judge(trial(0.9)))
    assert found.severity is Severity.WARNING
    assert "0.90x" in found.text and "49%" in found.text


def test_a_busy_machine_is_noticed() -> None:
    promised = EXPLORED.predicted_speedup
    for measured, unsure in ((promised, False), (1.3 * promised, True), (0.7 * promised, True)):
        assert ("measurement-unsure" in {f.code for f in judge(trial(measured))}) is unsure


def test_what_stands_in_the_way() -> None:
    slow = replace(
        EXPLORED,
        long=decoded(100, 8, (20, 0), (100, 20), draft=0.032, target=0.040),
    )
    assert judged(0.5, slow) == ["not-worth-it", "acceptance-low", "draft-dear", "verify-dear"]
    free = replace(slow, passes=(0,) * (LONG + 1))
    assert judged(1.2, free) == ["worth-it", "verify-dear"]


def test_report_and_record() -> None:
    measured = trial(1.3)
    findings = list(judge(measured))
    record = json.loads(json.dumps(report.record("m", "d", findings, measured)))
    assert record["run"]["best_draft_length"] == 2
    assert record["run"]["measured_speedup"] == 1.3
    promised = record["run"]["predicted_speedup"]
    assert record["run"]["predicted_by_measured"] == pytest.approx(promised / 1.3)
    assert len(record["run"]["predicted_speedup_by_length"]) == LONG
    assert record["errors"] == record["warnings"] == 0
    document = report.report_of("m", "d", findings, measured)
    assert [section.title for section in document.sections] == ["Measured"]
    (figure,) = document.figures()
    assert "draft length" in figure.draw()


def test_a_short_run(tiny_pair: TinyPair) -> None:
    from paceline import LLM

    plain = LLM(tiny_pair.target, draft="none", dtype="float32", device="cpu")
    spec = plain.beside(tiny_pair.target, draft_length=1, max_batch_size=1)
    heard: list[float] = []
    result = run_trial(plain, spec, 0.2, heard.append)
    # The draft is the target: everything is right, but for ties.
    assert (result.acceptance_rate or 0.0) > 0.9
    assert result.cost.tokens(DRAFTER, 2) >= 2
    assert result.plain.steps == result.plain.tokens
    assert result.long.steps < result.plain.steps
    assert result.long.tokens == result.long.steps + sum(result.long.accepted_at)
    assert heard == sorted(heard) and len(heard) >= 6
    speedups = (*result.predicted_speedup_by_length, result.measured_speedup)
    assert all(math.isfinite(value) and value > 0 for value in speedups)
    assert 1 <= result.best_draft_length <= LONG
    assert result.draft_cost_ratio is not None and result.draft_cost_ratio > 0.2
    assert 0 < result.seconds < 60
