"""Each limit of the forward is found, and said with its figures."""

from __future__ import annotations

import pytest
import torch

from paceline import LLM
from paceline.lab.profiling import steady
from paceline.lab.profiling.limits import (
    COMPUTE,
    MEMORY,
    NEITHER,
    SATURATED,
    Forward,
    MachineSpeeds,
    step_work,
)

MACHINE = MachineSpeeds("cpu", "float32", 2, read_bandwidth=25e9, peak_flops=200e9)


def forward(size: float, flops: float) -> Forward:
    """Ten milliseconds."""
    return Forward(0.010, size, flops, MACHINE)


FORWARDS = {
    MEMORY: forward(0.15e9, 0.15e9),  # 15 of 25 GB/s
    COMPUTE: forward(0.02e9, 1.4e9),  # 140 of 200 GFLOP/s
    NEITHER: forward(0.02e9, 0.02e9),
}


@pytest.mark.parametrize("expected", FORWARDS)
def test_three_bounds(expected: str) -> None:
    assert FORWARDS[expected].bound == expected
    words = FORWARDS[expected].explain()
    assert f"{expected} limit" in words and len(words.partition("What helps: ")[2]) > 15


def test_the_threshold_is_half_of_the_best() -> None:
    limit = SATURATED * 25e9 * 0.010
    assert [forward(f * limit, 0.0).bound for f in (0.99, 1.01)] == [NEITHER, MEMORY]


def test_explanations_contain_the_figures() -> None:
    assert "60% of the read bandwidth (25 GB/s)" in FORWARDS[MEMORY].explain()
    assert "70% of the large product's speed (200 GFLOP/s)" in FORWARDS[COMPUTE].explain()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_work_of_a_step(backend: str) -> None:
    """The sum of the matrices, which are read once, and the keys and values of both sequences."""
    llm = LLM(
        "paceline/tiny", "none", backend=backend, dtype="float32", device="cpu", max_batch_size=2
    )
    sums = steady.run(llm, [[5, 6, 7], [8, 9, 10, 11]], 6).sums
    size, flops = step_work(llm, sums)
    config = llm.target.hf.config
    width, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    keys = config.num_key_value_heads * head
    layer = 2 * width * config.num_attention_heads * head + 2 * width * keys + 3 * width * ffn
    weights = config.num_hidden_layers * layer + config.vocab_size * width
    assert flops == 2 * 2 * weights  # a row of each sequence
    cached = sums.context / sums.steps * config.num_hidden_layers * 2 * keys
    assert size == pytest.approx(torch.float32.itemsize * (weights + cached), rel=0.01)
    llm.close()
