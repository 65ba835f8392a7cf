"""What is concluded from steps whose costs are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from paceline.engine.driver import StepSums
from paceline.errors import DataError
from paceline.lab.tune import measure
from paceline.lab.tune.measure import Run, Sample, _drift, _scaled, _typical, _typical_pair
from support.tuning_methods import PLAIN, step, target


def run(batch: int, steps: Sequence[StepSums] = ()) -> Run:
    return Run(batch, [*steps], StepSums(), [])


def test_typical_steps_leave_out_hiccups_and_half_full_batches() -> None:
    costs = target(10_000)
    steps = [step(other=0.1)] * 9 + [step(target=50.0, other=0.1)] * 3
    typical = _typical(run(1, steps), costs)
    assert typical is not None and typical.steps == typical.sequences == 9
    assert typical.whole == pytest.approx(9 * 1.1)
    assert _typical(run(2, [step()] * 3), costs) is None
    typical = _typical(run(1, [step(0.5, nodes=1)] * 5), costs)
    assert typical is not None and typical.mean_seconds("draft") == 0.5


def test_one_run_stands_for_the_other() -> None:
    costs = target(10_000)
    alone, together = run(1, [step()]), run(8)
    first, second = _typical_pair([alone, together], costs)
    assert first == second
    with pytest.raises(DataError, match="too short to measure decoding on"):
        _typical_pair([together, together], costs)


def test_drift_scales_all_phases_and_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps now take twice as long, or implausibly much, or none is left to tell by."""
    before, sample = step(0.5, 1.0, 0.25, batch=2, nodes=3), Sample([[1]], [], 1, 8, 0.0)
    after = _scaled(before, 0.5)
    assert after.seconds == {phase: s / 2 for phase, s in before.seconds.items()}
    assert replace(after, seconds=before.seconds) == before
    plain = replace(PLAIN, steps=((0, step(target=1.0)),))
    for now, drift in ((2.0, 2.0), (9.0, 3.0), (0.1, 0.5), (None, 1.0)):
        steps = [] if now is None else [step(target=now)]
        monkeypatch.setattr(measure, "decode", lambda *_, steps=steps: run(1, steps))
        assert _drift(cast(Any, None), sample, target(10_000), plain) == drift
