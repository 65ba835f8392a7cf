"""What is said of a run, and the shares of its phases by the profiler's events."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.driver import StepTotals
from paceline.lab.profiling.limits import Phase, Work
from paceline.lab.profiling.runs import RunProfile
from paceline.lab.profiling.steady import shares


def run_profile(**changes: Any) -> RunProfile:
    values = {field.name: 0.0 for field in fields(RunProfile)}
    sums = StepTotals(steps=2, drafted=4)
    return RunProfile(**{**values, "name": "model", "phases": (), "sums": sums, **changes})


def test_warnings() -> None:
    assert run_profile(busy=0.09).warnings == []
    assert run_profile(name="plain", sums=StepTotals()).warnings == []
    (silent,) = run_profile(sums=StepTotals()).warnings
    assert silent.startswith("model: nothing was drafted")
    (busy,) = run_profile(busy=0.25).warnings
    assert busy.startswith("the machine is busy: ")
    assert "had the processor for 25% of the time" in busy


def test_the_verdict_on_a_step_is_that_of_most_of_its_time() -> None:
    parts = {"draft": (0.02, 0.0, 0.01, 0.01), "target": (0.03, 0.03, 0.0, 0.0)}
    phases = tuple(
        Phase(name, *seconds, Work(), seconds[0] / 0.05, 25e9, 40e9)
        for name, seconds in parts.items()
    )
    words = run_profile(name="ngram", phases=phases, sums=StepTotals(20, tokens=123)).verdict
    assert words[0] == (
        "ngram: a step takes 50 ms (123 tokens/s); 60% of it is nearest to memory bandwidth."
    )
    assert [line.partition(":")[0] for line in words[1:]] == ["target", "draft"]


def test_one_slow_call_does_not_distort_the_shares() -> None:
    """One call of 6.9 ms, in which another program ran, was blamed on kernel launches."""
    events = []
    for number in range(20):
        slow = 6900 if number == 7 else 0
        step = event("paceline: step", 130 + slow)
        target = event("paceline: target", 110 + slow, step)
        events += [step, target, event("aten::linear", 80, target)]
        events += [event("aten::add", 10 + slow, target), event("aten::add", 5, target)]
    share = shares(events)["target"]
    assert (share.wall, share.called) == pytest.approx((20 * 110e-6, 20 * 95e-6))
    assert share.kernel_seconds == pytest.approx(20 * 80e-6)


def test_steps_with_and_without_drafts_are_kept_apart() -> None:
    """Where most steps drafted nothing, the draft phase was said to be Python alone."""
    events = []
    for products in (0, 0, 0, 2, 2):
        step = event("paceline: step", 200)
        draft = event("paceline: draft", 10 + 80 * products, step)
        events += [step, draft, *(event("aten::linear", 80, draft) for _ in range(products))]
    share = shares(events)["draft"]
    assert (share.kernel_calls, share.kernel_seconds) == (4, pytest.approx(4 * 80e-6))
    assert share.wall == pytest.approx((3 * 10 + 2 * 170) * 1e-6)


def event(name: str, micros: float, parent: Any = None, device: float = 0.0) -> Any:
    made = SimpleNamespace(
        name=name,
        cpu_parent=parent,
        cpu_children=[],
        cpu_time_total=micros,
        device_time_total=device,
        device_type=SimpleNamespace(name="CPU"),
    )
    if parent is not None:
        parent.cpu_children.append(made)
    while parent is not None:  # as the profiler counts, with all that is inside
        parent.device_time_total += device
        parent = parent.cpu_parent
    return made


def test_events_are_assigned_to_phases() -> None:
    step = event("paceline: step", 100)
    target = event("paceline: target", 70, step)
    linear = event("aten::linear", 30, target)
    inner = event("aten::mm", 20, linear, device=7)
    share_of = shares(
        [
            step,
            target,
            linear,
            inner,
            event("cudaLaunchKernel", 5, inner),
            event("aten::add", 10, step),
            event("aten::ones", 9),
            SimpleNamespace(name="gemm", device_type=SimpleNamespace(name="CUDA")),
        ]
    )
    target_share, other = share_of["target"], share_of["other"]
    assert target_share.wall == pytest.approx(70e-6)
    assert other.wall == pytest.approx(30e-6)
    assert target_share.kernel_calls == 1
    assert target_share.called == target_share.kernel_seconds == pytest.approx(30e-6)
    assert target_share.device == pytest.approx(7e-6)
    assert (other.kernel_calls, other.called) == (0, pytest.approx(10e-6))
