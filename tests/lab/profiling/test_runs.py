"""What is said of a run."""

from __future__ import annotations

from collections import Counter

from paceline.engine.driver import StepTotals
from paceline.lab.profiling.limits import Forward, MachineSpeeds
from paceline.lab.profiling.runs import Phase, RunProfile

MACHINE = MachineSpeeds("cpu", "float32", 2, read_bandwidth=25e9, peak_flops=200e9)


def verdict(**seconds: float) -> str:
    step = sum(seconds.values())
    phases = tuple(Phase(name, taken, taken / step) for name, taken in seconds.items())
    forward = Forward(seconds["target"], 0.6e9, 1e9, MACHINE)
    sums = StepTotals(20, tokens=123)
    return RunProfile(sums, Counter(), Counter(), "ngram", phases, forward, 2).verdict


def test_the_verdict_is_on_the_phase_that_takes_most() -> None:
    words = verdict(draft=0.02, target=0.03)
    assert words.startswith(
        "ngram: a step takes 50 ms (123 tokens/s), 60% of it in the phase target. It reaches 80%"
    )
    assert "fewer bytes" in words
    words = verdict(draft=0.06, target=0.03)
    assert "67% of it in the phase draft. What helps: a smaller draft" in words


def test_every_phase_has_advice() -> None:
    for longest in ("draft", "target", "verify", "other"):
        words = verdict(**{"draft": 0.1, "target": 0.1, "verify": 0.1, "other": 0.1, longest: 0.9})
        assert f"the phase {longest}." in words
        assert words.endswith(".") and len(words.partition("What helps: ")[2]) > 15
