"""The ten seconds of measuring: its arithmetic on made-up steps, and a short run."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.driver import StepSums
from paceline.lab.budget import Budget
from paceline.lab.doctor.findings import Severity
from paceline.lab.doctor.trial import LONG, SpeedupTrial, judge, record, report_of, run_trial
from support.tiny_models import TinyPair
from support.tuning_methods import chain, step, target

# Half of the first tokens, and half of what follows each, is right; a pass takes a tenth.
STEPS = ((0, step()), (LONG, step(0.1 * LONG, nodes=LONG)))
EXPLORED = SpeedupTrial(target(10_000), step(), replace(chain(0.5, 0.1), steps=STEPS))


def test_figures_of_a_chain() -> None:
    assert EXPLORED.acceptance_rate == pytest.approx(0.5)
    assert EXPLORED.draft_cost_ratio == pytest.approx(0.1)
    assert EXPLORED.predicted_speedup_by_length[1] == pytest.approx(1.75 / 1.2, rel=0.03)
    assert EXPLORED.best.length == 2
    assert EXPLORED.best.speedup == pytest.approx(1.75 / 1.2, rel=0.03)


def test_drafts_that_are_looked_up() -> None:
    """There is no pass to be paid, and nothing may be looked up."""
    method = chain(0.5, 0.0)
    free = replace(method, costs=replace(method.costs, passes=(0,) * (LONG + 1)))
    assert replace(EXPLORED, method=free).draft_cost_ratio is None
    assert replace(EXPLORED, method=replace(free, levels=StepSums())).acceptance_rate is None


def trial(measured: float, explored: SpeedupTrial = EXPLORED) -> SpeedupTrial:
    return replace(explored, measured_speedup=measured, seconds=10.0)


def judged(measured: float, explored: SpeedupTrial = EXPLORED) -> list[str]:
    """Codes of the verdict, whether the machine was busy or not."""
    finding = judge(trial(measured, explored))
    return [item.code for item in finding if item.code != "measurement-unsure"]


def test_verdicts() -> None:
    assert judged(1.3) == ["worth-it"]
    assert judged(1.05) == ["barely-worth-it"]
    assert judged(0.9) == ["not-worth-it"]
    finding = next(judge(trial(0.9)))
    assert finding.severity is Severity.WARNING
    assert "0.90x" in finding.text and "50%" in finding.text


def test_a_busy_machine_is_noticed() -> None:
    promised = EXPLORED.best.speedup
    for measured, unsure in ((promised, False), (1.3 * promised, True), (0.7 * promised, True)):
        assert ("measurement-unsure" in {f.code for f in judge(trial(measured))}) is unsure


def test_what_stands_in_the_way() -> None:
    steps = ((LONG, step(1.0 * LONG, nodes=LONG)),)
    slow = replace(EXPLORED, method=replace(chain(0.2, 1.0), steps=steps), target=target(2))
    assert judged(0.5, slow) == ["not-worth-it", "acceptance-low", "draft-dear", "verify-dear"]
    costs = replace(slow.method.costs, passes=(0,) * (LONG + 1))
    free = replace(slow, method=replace(slow.method, costs=costs))
    assert judged(1.2, free) == ["worth-it", "verify-dear"]


def test_report_and_record() -> None:
    measured = trial(1.3)
    findings = list(judge(measured))
    about = "m", "d", findings, measured
    made = json.loads(json.dumps(record(*about)))
    assert made["run"]["best_draft_length"] == 2
    assert made["run"]["measured_speedup"] == 1.3
    promised = made["run"]["predicted_speedup"]
    assert made["run"]["predicted_by_measured"] == pytest.approx(promised / 1.3)
    assert len(made["run"]["predicted_speedup_by_length"]) == LONG
    assert made["errors"] == made["warnings"] == 0
    document = report_of(*about)
    assert [section.title for section in document.sections] == ["Measured"]
    (figure,) = document.figures()
    assert "draft length" in figure.draw()


def test_a_short_run(tiny_pair: TinyPair) -> None:
    from paceline import LLM

    plain = LLM(tiny_pair.target, draft="none", dtype="float32", device="cpu")
    spec = plain.beside(tiny_pair.target, draft_length=1, max_batch_size=1)
    budget, heard = Budget(0.2), list[float]()
    result = run_trial(plain, spec, budget, lambda: heard.append(budget.spent))
    # The draft is the target: everything is right, but for ties.
    assert (result.acceptance_rate or 0.0) > 0.9
    assert result.plain.steps == result.plain.tokens
    assert result.method.levels.rates[0] > 0.9
    assert heard == sorted(heard) and len(heard) >= 6
    speedups = (*result.predicted_speedup_by_length, result.measured_speedup)
    assert all(math.isfinite(value) and value > 0 for value in speedups)
    assert 1 <= result.best.length <= LONG
    assert result.draft_cost_ratio is not None and result.draft_cost_ratio > 0
    assert 0 < result.seconds < 60


def test_a_dear_draft_has_fewer_prompts(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is bounded, however long a draft takes."""
    from paceline import LLM

    plain = LLM(tiny_pair.target, draft="none", dtype="float32", device="cpu")
    spec = plain.beside(tiny_pair.draft, draft_length=1, max_batch_size=1)
    drafter = spec.engine.drafter
    propose = drafter.propose

    def dear(plan: Any) -> Any:
        time.sleep(0.05)
        return propose(plan)

    monkeypatch.setattr(drafter, "propose", dear)
    result = run_trial(plain, spec, Budget(3.0))
    assert result.method.steps[-1][1].mean_seconds("draft") > 0.01  # drift is taken out
    assert result.seconds < 6.0
