"""Each of the four limits is found, and said with its figures; shares become seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.lab.profiling.limits import (
    COMPUTE,
    LAUNCH,
    MEMORY,
    PYTHON,
    SATURATED,
    Phase,
    Work,
)
from paceline.lab.profiling.steady import Share


def work(size: float = 0.0, flops: float = 0.0, passes: float = 1.0) -> Work:
    """The work of a step that reads these bytes of weights this many times."""
    elements = size / 2
    return Work(
        ops=400,
        kernels=60,
        flops=flops,
        weight_bytes=size,
        weights={"weight": (int(elements / passes), int(size / passes))},
    )


def phase(size: float, flops: float, *parts: float) -> Phase:
    """Ten milliseconds, divided into ``parts``: kernels, calls, Python."""
    return Phase("target", 0.010, *parts, work(size, flops), 1.0, 25e9, 200e9)


USUAL = (0.004, 0.003, 0.003)
PHASES = {
    MEMORY: phase(0.15e9, 0.15e9, *USUAL),  # 15 of 25 GB/s
    COMPUTE: phase(0.02e9, 1.4e9, *USUAL),  # 140 of 200 GFLOP/s
    LAUNCH: phase(0.02e9, 0.02e9, 0.002, 0.005, 0.003),
    PYTHON: phase(0.02e9, 0.02e9, 0.002, 0.003, 0.005),
}


@pytest.mark.parametrize("expected", PHASES)
def test_four_bounds(expected: str) -> None:
    limited = PHASES[expected]
    assert limited.bound == expected
    assert limited.label == f"bound by {expected}"
    assert f"bound by {expected}" in limited.explain()


def test_the_threshold_is_half_of_the_best() -> None:
    limit = SATURATED * 25e9 * 0.010
    below, above = (phase(f * limit, 0.0, 0.002, 0.003, 0.005) for f in (0.99, 1.01))
    assert below.bound == PYTHON and not below.saturated
    assert above.bound == MEMORY and above.saturated


def test_slow_products_are_nearest_to_a_limit() -> None:
    slow = phase(0.05e9, 0.1e9, 0.008, 0.001, 0.001)
    assert slow.label == "nearest to memory bandwidth"
    assert "Products and attention take 80% of it" in slow.explain()
    assert "longer drafts" in slow.explain()  # not: fewer bytes
    assert phase(0.05e9, 0.6e9, 0.008, 0.001, 0.001).label == "nearest to compute"
    # Most of the time must be theirs, not only the largest part.
    assert replace(slow, kernels=0.0049, launches=0.003, python=0.0021).bound == LAUNCH


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            replace(PHASES[MEMORY], work=work(0.15e9, passes=5.0), name="draft").explain(),
            ("draft: 10 ms", "bound by memory bandwidth (60% of 25 GB/s)"),
        ),
        (
            PHASES[COMPUTE].explain(),
            ("bound by compute (70% of 200 GFLOP/s)",),
        ),
        (PHASES[LAUNCH].explain(), ("take 20% of it", "operators (400) 50%", "between them 30%")),
    ],
)
def test_explanations_contain_the_figures(words: str, parts: tuple[str, ...]) -> None:
    assert [part for part in parts if part not in words] == []


@pytest.mark.parametrize("limited", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("name", ["draft", "target", "verify", "other"])
def test_every_phase_has_advice_for_every_bound(limited: Phase, name: str) -> None:
    words = replace(limited, name=name).explain()
    assert words.endswith(".") and len(words.partition("What helps: ")[2]) > 15


def test_an_empty_phase_is_no_division_by_zero() -> None:
    nothing = Phase("draft", 0.0, 0.0, 0.0, 0.0, Work(), 0.0, 25e9, 200e9)
    assert nothing.of_read_bandwidth == nothing.of_peak_flops == 0.0
    assert nothing.explain()


# -- shares of the profiled steps ------------------------------------------------------------------


def divided(share: Share, product_seconds: float = 0.0) -> tuple[float, float, float]:
    """How a second of a phase is split, from ten profiled steps."""
    return share.split(1.0, product_seconds, steps=10)


def test_shares() -> None:
    share = Share(wall=10.0, called=6.0, kernel_seconds=4.0, kernel_calls=2)
    assert divided(share) == pytest.approx((0.4, 0.2, 0.4))
    # The price of a product's call is no kernel: half a second each of the profiled ten.
    assert divided(share, 0.5) == pytest.approx((0.3, 0.3, 0.4))


def test_on_cuda_the_device_comes_first() -> None:
    share = Share(wall=10.0, called=5.0, device=3.0)
    assert divided(share) == pytest.approx((0.3, 0.35, 0.35))


def test_a_phase_without_operators_is_python() -> None:
    assert divided(Share()) == (0.0, 0.0, 1.0)
