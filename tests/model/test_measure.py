"""Forwards measured outside decoding."""

from __future__ import annotations

import pytest

from paceline import LLM
from paceline.core.batch import Batch, ModelOutput
from paceline.model.measure import measure_target
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("paceline/tiny", draft="none", max_batch_size=2)


def test_measuring_forwards_leaves_no_trace(llm: LLM) -> None:
    cache = llm.engine.cache
    before = cache.pool.available
    costs = measure_target(llm.target, cache, {1: (1,), 2: (1, 3, 4)})
    assert costs.batches == (1, 2)
    assert costs(1, 1) > 0 and 0 < costs(2, 1) <= costs(2, 4)
    assert cache.pool.available == before and not llm.engine.has_work


def test_forwards_are_those_of_greedy_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the logits of 32 rows and reading them again took 3.6 ms of 20; no step does that."""
    asked = []
    forward = CausalModel.__call__

    def called(self: CausalModel, batch: Batch, cache: PagedCache) -> ModelOutput:
        asked.append(batch.choices_only)
        return forward(self, batch, cache)

    monkeypatch.setattr(CausalModel, "__call__", called)
    measure_target(llm.target, llm.engine.cache, {1: (1, 4)})
    assert asked and all(asked)


def test_chains_and_batches_beyond_the_cache_are_left_out(llm: LLM) -> None:
    costs = measure_target(llm.target, llm.engine.cache, {1: (1, 10**6), 10**6: (1,)})
    assert costs.batches == (1,) and costs.curves[0].tokens == (1,)
