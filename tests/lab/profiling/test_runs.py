"""Shares of the profiled steps become seconds of the others."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.driver import StepSums
from paceline.lab.profiling.runs import RunProfile, figures_of, split
from paceline.lab.profiling.steady import Stretch, medians
from paceline.lab.profiling.trace import Profiled, Share, operators, shares
from paceline.lab.profiling.work import Work

STRETCH = Stretch(StepSums(steps=10, tokens=10), 0.0)


def profiled(share: Share, event_seconds: float = 0.0) -> Profiled:
    return Profiled(STRETCH, {"target": share}, (), event_seconds)


def test_shares_without_overhead() -> None:
    share = Share(wall=10.0, calls=8, events=8, seconds=6.0, kernel_calls=2, kernel_events=2)
    share.kernel_seconds = 4.0
    assert split(profiled(share), "target", 1.0, "cpu", 0.0) == pytest.approx((0.4, 0.2, 0.4))
    # The price of a product's call is no kernel: half a second each of the profiled ten.
    assert split(profiled(share), "target", 1.0, "cpu", 0.5) == pytest.approx((0.3, 0.3, 0.4))


def test_what_recording_took_is_taken_off() -> None:
    """Ten events of 0.2 s: a second inside eight calls of Python, and two events nested."""
    share = Share(wall=12.0, calls=8, events=10, seconds=6.0 + 1.2, kernel_calls=0)
    kernels, launches, python = split(profiled(share, 0.2), "target", 1.0, "cpu", 0.0)
    assert (kernels, launches, python) == pytest.approx((0.0, 0.6, 0.4))


def test_on_cuda_the_device_comes_first() -> None:
    share = Share(wall=10.0, calls=8, events=8, seconds=5.0, device=3.0)
    parts = split(profiled(share), "target", 1.0, "cuda", 0.0)
    assert parts == pytest.approx((0.3, 0.35, 0.35))


def test_a_phase_without_operators_is_python() -> None:
    assert split(profiled(Share()), "draft", 0.5, "cpu", 0.0) == (0.0, 0.0, 0.5)


def test_figures_are_those_of_one_step() -> None:
    work = Work(ops=40, kernels=20, flops=4000, product_flops=4000, weight_elements=400)
    work.weight_bytes, work.cache_bytes, work.weights = 800, 200, {"w": (50, 100)}
    figures = figures_of("draft", 0.5, work, 4, (0.2, 0.2, 0.1), 10.0)
    assert (figures.calls, figures.kernel_calls, figures.bytes, figures.flops) == (10, 5, 250, 1000)
    assert (figures.parameters, figures.passes, figures.rows) == (50, 2.0, 5.0)
    assert figures.bytes_per_second == 500 and figures.weight_bits == 16


def run_profile(**changes: Any) -> RunProfile:
    values = {field.name: 0.0 for field in fields(RunProfile)}
    return RunProfile(**{**values, "name": "model", "figures": (), **changes})


def test_warnings() -> None:
    assert run_profile(drafts=True, drafted=4, busy=0.09).warnings() == []
    assert run_profile(drafts=False, drafted=0, busy=0.0).warnings() == []
    (silent,) = run_profile(drafts=True, drafted=0).warnings()
    assert silent.startswith("model: nothing was drafted")
    (busy,) = run_profile(drafts=False, busy=0.25).warnings()
    assert busy.startswith("the machine is busy: ")
    assert "had the processor for 25% of the time" in busy
    crowded, silent = run_profile(drafts=True, drafted=0, load=1.5).warnings()
    assert crowded.startswith("the machine is busy: 1.5 programs a processor wanted to run")
    assert silent.startswith("model: nothing was drafted")
    assert run_profile(drafts=False, load=0.9).warnings() == []


def test_one_slow_call_among_hundreds_is_not_what_a_step_waits_for() -> None:
    """One call of 6.9 ms, in which another program ran, was blamed on kernel launches."""
    events = []
    for number in range(20):
        slow = 6900 if number == 7 else 0
        step = event("paceline: step", 130 + slow)
        target = event("paceline: target", 110 + slow, step)
        events += [step, target, event("aten::linear", 80, target)]
        events += [event("aten::add", 10 + slow, target), event("aten::add", 5, target)]
    found = shares(events)["target"]
    assert (found.wall, found.seconds) == pytest.approx((20 * 110e-6, 20 * 95e-6))
    assert found.kernel_seconds == pytest.approx(20 * 80e-6)
    kernels, launches, _ = split(profiled(found), "target", 1.0, "cpu", 0.0)
    assert kernels > 5 * launches


def test_the_table_of_operators_is_of_the_median_step() -> None:
    """One call of 7 ms made its operator the dearest."""
    events = []
    for number in range(9):
        step = event("paceline: step", 100)
        target = event("paceline: target", 90, step)
        events += [
            step,
            target,
            event("aten::linear", 60, target),
            event("aten::linear", 20, target),
        ]
        events.append(event("aten::add", 7000 if number == 4 else 5, target))
    first, second = operators(events, "cpu")
    assert (first.name, first.calls, second.name) == ("aten::linear", 18, "aten::add")
    assert first.seconds == pytest.approx(9 * 80e-6) and second.seconds == pytest.approx(9 * 5e-6)


def test_of_each_step_the_median_over_the_rounds_counts() -> None:
    calm = [{"draft": 0.0, "target": 1.0 + n, "verify": 0.0, "other": 0.0} for n in range(3)]
    hit = [{**step, "target": 50.0} if n == 1 else step for n, step in enumerate(calm)]
    rounds = [Stretch(StepSums(steps=3), 0.0, tuple(own)) for own in (calm, hit, calm)]
    assert medians(rounds)["target"] == 2.0


def event(name: str, micros: float, parent: Any = None, device: float = 0.0) -> Any:
    return SimpleNamespace(
        name=name,
        cpu_parent=parent,
        cpu_time_total=micros,
        self_cpu_time_total=micros,
        self_device_time_total=device,
        device_type=SimpleNamespace(name="CPU"),
    )


def test_events_find_their_phase() -> None:
    step = event("paceline: step", 100)
    target = event("paceline: target", 70, step)
    linear = event("aten::linear", 30, target)
    inner = event("aten::mm", 20, linear, device=7)
    found = shares(
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
    target_share, other = found["target"], found["other"]
    assert target_share.wall == pytest.approx(70e-6)
    assert other.wall == pytest.approx(30e-6)
    assert (target_share.calls, target_share.events, target_share.launches) == (1, 3, 1)
    assert (target_share.kernel_calls, target_share.kernel_events) == (1, 3)
    assert target_share.seconds == target_share.kernel_seconds == pytest.approx(30e-6)
    assert target_share.device == pytest.approx(7e-6)
    assert (other.calls, other.kernel_calls, other.seconds) == (1, 0, pytest.approx(10e-6))
