"""Anything that happens to an engine, in any order: whatever ends has plain decoding's tokens.

EVENTS=1000000 python -m pytest tests/engine/test_events.py
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline import LLM, SamplingParams
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.request.request import Request
from support.cache_invariants import check_cache
from support.engine_models import write_pair
from support.faults import STAGES, Fault

EVENTS, STEPS = int(os.environ.get("EVENTS", "1200")), 60
PROMPTS = (
    "Once upon a time there was a little",
    "def add(a, b)",
    "the cat the cat the cat the",
    "a",
)
DRAFTS = ("none", "ngram", "suffix", "recycling", "lookahead", "early_exit")
DRAFTS += () if torch.cuda.is_available() else ("quantized:int8",)  # it is for processors
DRAFTS += ("{draft}", "tree:{draft},nodes=6,width=3", "hybrid:suffix+ngram+model:{draft}")
_FOLDER = TemporaryDirectory()


@cache
def pair() -> tuple[LLM, str]:
    """The target, decoding plainly, and the draft's folder."""
    target, draft = write_pair(Path(_FOLDER.name))
    return LLM(target, "none", dtype="float32", max_batch_size=1), draft


def asked(length: int, seed: int | None) -> SamplingParams:
    drawn: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed}
    return SamplingParams(max_tokens=length, ignore_eos=True, **drawn)


@cache
def alone(prompt: str, length: int, seed: int | None) -> list[int]:
    return list(pair()[0].generate(prompt, asked(length, seed))[0].token_ids)


class Events(RuleBasedStateMachine):
    """Several requests in a cache that cannot hold them all."""

    @initialize(draft=st.sampled_from(DRAFTS), length=st.sampled_from([1, 3, "auto"]))
    def start(self, draft: str, length: int | str) -> None:
        plain, folder = pair()
        spec = draft.format(draft=folder)
        self.llm = plain.beside(spec, draft_length=length, max_batch_size=4)
        pool = self.llm.engine.cache.pool
        self.taken = pool.allocate(pool.available - 8)
        self.requests: list[tuple[Request, list[int]]] = []
        self.number = 0

    def alive(self) -> list[Request]:
        return [request for request, _ in self.requests if request.completion is None]

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.sampled_from([1, 7, 40]),
        seed=st.sampled_from([None, 3]),
    )
    def add(self, prompt: str, length: int, seed: int | None) -> None:
        (request,) = self.llm.prepare(prompt, asked(length, seed), self.number)
        self.number += 1
        self.llm.enqueue([request])
        self.requests.append((request, alone(prompt, length, seed)))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.llm.step()

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        """Which are alive depends on time, and a strategy may not."""
        alive = self.alive()
        self.llm.owner.abort(alive[pick % len(alive) :][:1] if alive else [])

    @rule()
    def preempt(self) -> None:
        """The next reservation finds no room: the youngest gives way, if there are two."""
        self.during_a_step(self.llm.engine.cache, "reserve", OutOfBlocksError("planted"))

    @rule(stage=st.sampled_from(sorted(STAGES)))
    def fail(self, stage: str) -> None:
        error = torch.OutOfMemoryError if stage == "allocation" else RuntimeError
        self.during_a_step(*STAGES[stage](self.llm), error("planted"))

    def during_a_step(self, owner: Any, name: str, error: Exception) -> None:
        if len(self.llm.engine.scheduler.running) < 2:
            return
        before = getattr(owner, name)
        Fault(owner, name, lambda fault, *_: fault.calls == 1, error)
        try:
            self.llm.step()
        finally:
            setattr(owner, name, before)

    @precondition(lambda self: self.taken)
    @rule(count=st.integers(1, 8))
    def grow(self, count: int) -> None:
        for block in self.taken[:count]:
            self.llm.engine.cache.pool.release(block)
        del self.taken[:count]

    @rule()
    def reload(self) -> None:
        """All is dropped; a prompt's blocks may stay in the cache."""
        self.llm.release([request for request, _ in self.requests])
        self.requests = []
        assert not self.llm.engine.has_work

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "llm"):
            held = self.llm.engine.cache
            held._tables[-1] = type("Taken", (), {"blocks": self.taken, "digests": ()})()
            try:
                check_cache(held)
            finally:
                del held._tables[-1]

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        for _ in range(2000):
            if not self.llm.engine.has_work:
                break
            self.llm.step()
        for request, wanted in self.requests:
            done = request.completion
            assert done is not None and done.finish_reason in ("length", "abort"), done
            assert done.token_ids == wanted[: len(done.token_ids)]
            assert done.finish_reason == "abort" or len(done.token_ids) == len(wanted)
        self.llm.release([request for request, _ in self.requests])
        pool = self.llm.engine.cache.pool
        assert pool.available + len(self.taken) == pool.total


Events.TestCase.settings = settings(
    max_examples=max(1, EVENTS // STEPS),
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEvents = Events.TestCase
