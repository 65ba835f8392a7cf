"""Each of the four limits is found, and said with its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.lab.profiling.machine import MachineSpeeds
from paceline.lab.profiling.verdict import (
    SATURATED,
    Bound,
    Figures,
    bound,
    conclude,
    explain,
    label,
    saturated,
)

MACHINE = MachineSpeeds(
    device="cpu",
    dtype="bfloat16",
    threads=1,
    copy_bandwidth=20e9,
    read_bandwidth=25e9,
    buffer_bytes=2**27,
    cache_bytes=2**25,
    products=((1, 40e9), (256, 200e9)),
    op_seconds=0.5e-6,
    product_seconds=10e-6,
)
# Ten milliseconds, of which nothing stands out yet.
PHASE = Figures("target", 0.010, 0.004, 0.003, 0.003, calls=400, kernel_calls=60, bandwidth=25e9)
MEMORY = replace(PHASE, bytes=0.15e9, flops=0.15e9, rows=1.0)  # 15 of 25 GB/s
COMPUTE = replace(PHASE, bytes=0.02e9, flops=1.4e9, rows=64.0)  # 140 of 200 GFLOP/s
LAUNCH = replace(PHASE, kernels=0.002, launches=0.005, python=0.003, bytes=0.02e9, flops=0.02e9)
PYTHON = replace(PHASE, kernels=0.002, launches=0.003, python=0.005, bytes=0.02e9, flops=0.02e9)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (MEMORY, Bound.MEMORY),
        (COMPUTE, Bound.COMPUTE),
        (LAUNCH, Bound.LAUNCH),
        (PYTHON, Bound.PYTHON),
    ],
)
def test_four_bounds(figures: Figures, expected: Bound) -> None:
    assert bound(figures, MACHINE) is expected
    assert label(figures, MACHINE) == expected.value
    assert f"bound by {expected.value}." in explain(figures, MACHINE)


def test_the_threshold_is_half_of_the_best() -> None:
    below = replace(PYTHON, bytes=0.99 * SATURATED * 25e9 * 0.010)
    assert bound(below, MACHINE) is Bound.PYTHON
    above = replace(PYTHON, bytes=1.01 * SATURATED * 25e9 * 0.010)
    assert bound(above, MACHINE) is Bound.MEMORY
    assert not saturated(below, MACHINE) and saturated(above, MACHINE)


def test_slow_products_are_nearest_to_a_limit() -> None:
    slow = replace(PHASE, kernels=0.008, launches=0.001, python=0.001, bytes=0.05e9, flops=0.1e9)
    assert label(slow, MACHINE) == "nearest to memory bandwidth"
    assert "Products and attention take 80% of the time" in explain(slow, MACHINE)
    assert "longer drafts" in explain(slow, MACHINE)  # not: fewer bytes
    assert label(replace(slow, flops=0.6e9), MACHINE) == "nearest to compute"
    # Most of the time must be theirs, not only the largest part.
    assert bound(replace(slow, kernels=0.0049, launches=0.003, python=0.0021), MACHINE) is (
        Bound.LAUNCH
    )


def test_words_carry_the_figures() -> None:
    words = explain(replace(MEMORY, passes=5.0, parameters=1_670_000, name="draft"), MACHINE)
    assert words.startswith("Draft: 10 ms, bound by memory bandwidth. It moves 150 MB in 5.0 ")
    for part in ("1.67 M parameters", "15 GB/s", "75% of the copy", "60% of what", "(25 GB/s)"):
        assert part in words
    words = explain(COMPUTE, MACHINE)
    for part in ("1.4 GFLOP", "64 rows", "140 GFLOP/s", "70% of the best (200)"):
        assert part in words
    words = explain(LAUNCH, MACHINE)
    for part in ("400 operators takes 50%", "them 30%", "20%", "60 products", "10.0 µs", "0.5 µs"):
        assert part in words
    words = explain(PYTHON, MACHINE)
    for part in ("50% of it passes between its 400 operators, 30% in calling", "get 20%"):
        assert part in words


def test_every_phase_has_a_cure_for_every_bound() -> None:
    for figures in (MEMORY, COMPUTE, LAUNCH, PYTHON):
        for name in ("draft", "target", "verify", "other"):
            words = explain(replace(figures, name=name), MACHINE)
            assert words.endswith(".") and len(words.partition("What helps: ")[2]) > 20


def test_the_step_is_what_most_of_it_is() -> None:
    phases = [PYTHON, replace(MEMORY, seconds=0.030, bytes=0.45e9), replace(LAUNCH, name="draft")]
    assert conclude("ngram", phases, MACHINE, 123.4) == (
        "ngram: a step takes 50 ms (123 tokens/s); 60% of it is bound by memory bandwidth."
    )


def test_an_empty_phase_is_no_division_by_zero() -> None:
    nothing = Figures("draft", 0.0, 0.0, 0.0, 0.0)
    assert nothing.of_bandwidth() == nothing.of_compute(MACHINE) == 0.0
    assert explain(nothing, MACHINE)
