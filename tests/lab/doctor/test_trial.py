"""The ten seconds of measuring: its arithmetic on made-up steps, and a short run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from paceline.engine.clock import PHASES
from paceline.engine.driver import StepSums
from paceline.lab.doctor import summary
from paceline.lab.doctor.findings import Severity
from paceline.lab.doctor.trial import LONG, Exploration, SpeedupTrial, judge, run_trial
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
EXPLORED = Exploration(
    plain=decoded(100, 0, target=0.010, other=0.001),
    long=decoded(
        100, 8, HALVES, (100, *HALVES[:-1]), draft=0.008, target=0.012, verify=0.001, other=0.001
    ),
    short=decoded(100, 2, HALVES[:2], (100, 50), draft=0.002, target=0.011, verify=0.001),
    passes=tuple(range(LONG + 1)),
    nodes=tuple(range(LONG + 1)),
)


def test_figures_of_a_chain() -> None:
    assert EXPLORED.acceptance == pytest.approx(98 / 198)
    assert EXPLORED.per_position[:2] == (0.5, 0.5)
    assert EXPLORED.cost_ratio == pytest.approx(0.1)
    assert EXPLORED.target.tokens == (1, 3, 9)
    assert EXPLORED.target(1) == pytest.approx(0.010)
    assert EXPLORED.target(6) == pytest.approx(0.0115)
    assert EXPLORED.tokens(2) == pytest.approx(1.75)
    # Two passes of 1 ms, three rows for 11 ms, and 1 ms of all else.
    assert EXPLORED.step(2) == pytest.approx(0.014)
    assert EXPLORED.speedup(2) == pytest.approx(1.75 * 0.011 / 0.014)
    assert EXPLORED.best == 2
    a = EXPLORED.acceptance
    assert EXPLORED.textbook == pytest.approx((1 - a**3) / ((1 - a) * 1.2))


def test_drafts_that_are_looked_up() -> None:
    """Half of the drafts find nothing; there is no pass to be paid."""
    found = replace(
        EXPLORED,
        long=decoded(100, 4, (40, 40), (50, 40), draft=0.001, target=0.012),
        short=decoded(100, 1, (40, 40), (50, 40), draft=0.001, target=0.011),
        passes=(0,) * (LONG + 1),
    )
    assert found.cost_ratio is None and found.textbook is None
    assert found.tokens(LONG) == pytest.approx(1.8)
    plain = found.plain.mean_seconds("target", "verify", "other")
    assert found.step(4) == pytest.approx(0.001 + plain + (0.012 - plain) / 3, rel=0.01)
    assert found.best == 2


def test_trees_have_no_textbook() -> None:
    found = replace(EXPLORED, nodes=tuple(2 * n for n in range(LONG + 1)))
    assert found.textbook is None


def test_decoded_add_up() -> None:
    both = EXPLORED.long + EXPLORED.short
    assert (both.steps, both.drafted) == (200, 1000)
    assert both.accepted_at[:3] == (100, 50, 12)
    assert both.mean_seconds("draft") == pytest.approx(0.005)
    assert EXPLORED.plain.rate == pytest.approx(100 / 1.1)


def trial(measured: float, explored: Exploration = EXPLORED) -> SpeedupTrial:
    return SpeedupTrial(explored, measured, 10.0)


def told(measured: float, explored: Exploration = EXPLORED) -> list[str]:
    """Codes of the verdict, whether the machine was busy or not."""
    found = judge(trial(measured, explored))
    return [item.code for item in found if item.code != "measurement-unsure"]


def test_verdicts() -> None:
    assert told(1.3) == ["worth-it"]
    assert told(1.05) == ["barely-worth-it"]
    assert told(0.9) == ["not-worth-it"]
    found = judge(trial(0.9))[0]
    assert found.severity is Severity.WARNING
    assert "0.90x" in found.found and "49%" in found.found


def test_a_busy_machine_is_noticed() -> None:
    promised = EXPLORED.speedup(EXPLORED.best)
    for measured, unsure in ((promised, False), (1.3 * promised, True), (0.7 * promised, True)):
        assert ("measurement-unsure" in {f.code for f in judge(trial(measured))}) is unsure


def test_what_stands_in_the_way() -> None:
    slow = replace(
        EXPLORED,
        long=decoded(100, 8, (20, 0), (100, 20), draft=0.032, target=0.040),
        short=decoded(100, 2, (20, 0), (100, 20), draft=0.008, target=0.030),
    )
    assert told(0.5, slow) == ["not-worth-it", "acceptance-low", "draft-dear", "verify-dear"]
    free = replace(slow, passes=(0,) * (LONG + 1))
    assert told(1.2, free) == ["worth-it", "verify-dear"]


def test_report_and_record() -> None:
    measured = trial(1.3)
    findings = judge(measured)
    record = json.loads(json.dumps(summary.record("m", "d", findings, measured)))
    assert record["run"]["best_draft_length"] == 2
    assert record["run"]["measured_speedup"] == 1.3
    promised = record["run"]["predicted_speedup"]
    assert record["run"]["predicted_by_measured"] == pytest.approx(promised / 1.3)
    assert len(record["run"]["predicted_speedup_by_length"]) == LONG
    assert record["errors"] == record["warnings"] == 0
    report = summary.report_of("m", "d", findings, measured)
    assert [section.title for section in report.sections] == ["Measured"]
    (figure,) = report.figures()
    assert "draft length" in figure.draw()


def test_a_short_run(tiny_pair: TinyPair) -> None:
    from paceline import LLM

    plain = LLM(tiny_pair.target, draft="none", dtype="float32", device="cpu")
    spec = plain.beside(tiny_pair.target, draft_length=1, max_batch_size=1)
    heard: list[float] = []
    result = run_trial(plain, spec, 0.2, heard.append)
    found = result.explored
    # The draft is the target: everything is right, but for ties.
    assert found.acceptance > 0.9
    assert found.tokens(2) >= 2
    assert found.plain.steps == found.plain.tokens
    assert found.long.steps < found.plain.steps
    assert found.long.tokens == found.long.steps + sum(found.long.accepted_at)
    assert heard == sorted(heard) and len(heard) >= 8
    assert all(math.isfinite(value) and value > 0 for value in (*found.predicted, result.measured))
    assert 1 <= found.best <= LONG
    assert found.cost_ratio is not None and found.cost_ratio > 0.2
    assert 0 < result.seconds < 60


def test_drafts_that_were_cut_short_cost_what_they_are() -> None:
    """Half of the steps had room for two tokens only."""
    long = EXPLORED.long
    half = decoded(
        100, 2, (50, 25), (100, 50), draft=0.002, target=0.011, verify=0.001, other=0.001
    )
    mixed = replace(EXPLORED, long=long + half)
    assert mixed.cost_ratio == pytest.approx(0.1)
    assert mixed.tokens(2) == pytest.approx(1.75)
    assert mixed.step(2) == pytest.approx(0.014, rel=0.03)
