"""The counted bytes and FLOPs are those of a calculation by hand."""

from __future__ import annotations

import pytest
import torch

from paceline.core.batch import Span
from paceline.core.tree import chain_parents
from paceline.lab.profiling.limits import Work, WorkCounter
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from support.engine_models import VOCAB, adapted

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD = 2, 32, 48, 4, 2, 8  # of engine_models.random_llama
CONTEXT, ROWS = 5, 3
PER_LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * HEAD + 3 * WIDTH * FFN
WEIGHTS = LAYERS * PER_LAYER + VOCAB * WIDTH


def forward_of(model: CausalModel, coded: bool = False) -> Work:
    """One pending token and two nodes after five cached tokens, in float32."""
    cache = PagedCache(model.cache_shapes, 4, 16, torch.int8 if coded else model.dtype, "cpu")
    cache.admit(1, [0])
    cache.reserve(1, CONTEXT + ROWS)
    model(cache.batch_of([Span.of(1, 0, [3] * CONTEXT)]), cache)
    batch = cache.batch_of([Span.of(1, CONTEXT, [4], chain_parents(2), torch.tensor([5, 6]))])
    counter = WorkCounter()
    with counter.phase("step"), counter.phase("target"):
        model(batch, cache)
    return counter.phases["target"]


@pytest.mark.parametrize("how", ["native", "native, int8 cache", "whole"])
@torch.inference_mode()
def test_a_forward(how: str) -> None:
    model = adapted()
    native, coded = how.startswith("native"), "int8" in how
    if native:
        assert model.use_backend("native")
    work = forward_of(model, coded)
    assert work.weight_bytes >= 4 * WEIGHTS  # packed ones are padded
    assert work.parameters == WEIGHTS
    keys = CONTEXT + ROWS
    entry = HEAD + 4 if coded else 4 * HEAD
    assert work.cache_bytes == LAYERS * 2 * KV_HEADS * entry * keys
    attention = 4 * LAYERS * ROWS * HEADS * HEAD * keys
    assert work.flops == 2 * ROWS * WEIGHTS + attention
    products = LAYERS * 7 + 1
    assert work.kernels == (1 if native else products + LAYERS)


@torch.inference_mode()
def test_a_view_reads_none_of_the_layers_that_it_skips() -> None:
    model = adapted()
    assert model.use_backend("native")
    whole = forward_of(model)
    model.backend = model.backend.without_layers(frozenset({0}))
    work = forward_of(model)
    assert work.parameters == WEIGHTS - PER_LAYER
    assert work.cache_bytes == whole.cache_bytes // LAYERS
    attention = 4 * ROWS * HEADS * HEAD * (CONTEXT + ROWS)
    assert work.flops == 2 * ROWS * (WEIGHTS - PER_LAYER) + attention


@pytest.mark.parametrize("inference", [False, True])
def test_an_outer_product_reads_no_weight(inference: bool) -> None:
    """How older transformers multiply frequencies and positions of RoPE."""
    counter = WorkCounter()
    with torch.inference_mode(inference), counter.phase("step"):
        torch.ones(1, HEAD // 2, 1) @ torch.ones(1, 1, ROWS)
    work = counter.phases["other"]
    assert (work.kernels, work.flops, work.parameters) == (0, 0, 0)


def test_only_steps_are_counted_and_each_phase_has_its_own() -> None:
    counter = WorkCounter()
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    a @ b
    with counter.phase("step"):
        a @ b
        with counter.phase("draft"):
            a @ b
            a @ b
    a @ b
    assert {name: work.flops for name, work in counter.phases.items()} == {"other": 48, "draft": 96}
    draft = counter.phases["draft"]
    assert (draft.weight_bytes, draft.parameters, draft.weight_bits) == (2 * 48, 12, 32)


def test_all_operators_of_products_are_counted() -> None:
    a, b, bias = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4)
    batch = torch.ones(5, 2, 3), torch.ones(5, 3, 4)
    spellings = [
        (lambda: torch.mm(a, b), 48),
        (lambda: torch.addmm(bias, a, b), 48),
        (lambda: torch.nn.functional.linear(a, b.T.contiguous()), 48),
        (lambda: torch.bmm(*batch), 240),
        (lambda: torch.einsum("bij,bjk->bik", *batch), 240),
        (lambda: torch.mv(b.T, b[:, 0]), 24),
    ]
    for run, flops in spellings:
        counter = WorkCounter()
        with counter.phase("step"), torch.inference_mode():
            run()
        assert sum(work.flops for work in counter.phases.values()) == flops
