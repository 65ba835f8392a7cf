"""Anything that happens to an engine, in any order: whatever ends has plain decoding's tokens, and
nothing is lost or kept. The model is mostly scripted (support/scripted_model.py), now and then a
tiny one of the kernels or of transformers; all else is real.

EVENTS=1000000 python -m pytest -s tests/engine/test_events.py
TARGETS=native limits them to one of the models (support/event_requests.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline import LLM, EngineLostError
from paceline.control.controller import Controller, Decision
from paceline.core.memory import held_memory
from paceline.engine.scheduler import SchedulerConfig
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.request.completion import Completion
from paceline.request.request import Request
from support.cache_invariants import check_cache, kept
from support.event_requests import (
    ASKED,
    DRAFTS,
    HEADS,
    PROMPTS,
    REAL_HEADS,
    TARGETS,
    alone,
    folders,
    params_of,
    plain,
)
from support.faults import STAGES, Fault

EVENTS, PART, STEPS = int(os.environ.get("EVENTS", "1200")), 70_000, 60
SEAMS = STAGES | {
    "admit": lambda llm: (llm.engine.cache, "admit"),
    "commit": lambda llm: (llm.engine.cache, "commit"),
    "predictions": lambda llm: (llm.engine.predictions, "propose_with"),
    "scoring": lambda llm: (llm.engine, "score_prompts"),
    "forget": lambda llm: (llm.engine.drafter, "forget"),
    "states": lambda llm: (llm.engine.cache.states, "route"),
}
_IDS = itertools.count(1 << 40)  # no other numbers are as large
COUNTS: Counter[str] = Counter()
# A step of transformers takes as long as a hundred of the scripted model.
KINDS = os.environ.get(
    "TARGETS", " ".join((*TARGETS[:2] * 9, *TARGETS[2:3] * 4, TARGETS[3]))
).split()


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    """Drafts are read, and a target's steps measured, once."""
    from paceline import build, llm

    load, measured = llm.load_draft, build.measure_costs
    drafts: dict[Any, Any] = {}
    costs: dict[Any, Any] = {}

    def loading(draft: Any, target: Any, *rest: Any) -> Any:
        key = id(target), draft, rest[1].max_batch_size
        if key not in drafts:
            drafts[key] = load(draft, target, *rest)
        return drafts[key]

    def measuring(target: Any, *rest: Any) -> Any:
        if id(target) not in costs:
            costs[id(target)] = measured(target, *rest)
        return costs[id(target)]

    began = time.perf_counter()
    logging.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "load_draft", loading)
        patch.setattr(llm, "SEQUENCE_IDS", _IDS)
        patch.setattr(build, "measure_costs", measuring)
        yield
    logging.disable(logging.NOTSET)
    took = time.perf_counter() - began
    print(f"\n{COUNTS.total()} events in {took:.0f} s: {dict(COUNTS.most_common())}")


class Anything(Controller):
    """Any draft length, at random."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)

    def lengths(self, seqs: Sequence[Any]) -> list[Decision]:
        return [Decision(self._chooser.choice((0, 1, 2, 3, 5))) for _ in seqs]


class Events(RuleBasedStateMachine):
    """Several requests in a cache that cannot hold them all."""

    def __init__(self) -> None:
        super().__init__()
        self.llm: LLM | None = None

    @initialize(
        kind=st.sampled_from(KINDS),
        draft=st.sampled_from(DRAFTS * 2 + HEADS),
        head=st.sampled_from(REAL_HEADS + ("",) * len(REAL_HEADS)),
        length=st.sampled_from([1, 3, "auto", "any", "any"]),
        chunk=st.sampled_from([3, 512]),
        batch=st.sampled_from([2, 4, 4, 7]),
    )
    def start(
        self, kind: str, draft: str, head: str, length: int | str, chunk: int, batch: int
    ) -> None:
        self.kind = kind
        if head and kind in ("native", "reference"):
            draft = head
        any_length: dict[str, Any] = {"controller": Anything(COUNTS.total())}
        how = any_length if length == "any" else {"draft_length": length}
        drafts = tuple(draft.format(**folders(kind)).split("|"))
        self.llm = plain(kind).with_draft(drafts, max_batch_size=batch, **how)
        engine = self.llm.engine
        engine.scheduler.config = SchedulerConfig(batch, 2 * chunk + 1, chunk, 160)
        pool = engine.cache.pool
        self.taken = pool.allocate(pool.available - 8)
        self.requests: list[tuple[Request, Completion, list[Any]]] = []
        self.ended: list[Request] = []
        self.forgot = False  # a drafter that fails to forget keeps something
        self.may_fail: set[int] = set()
        COUNTS["start"] += 1

    @rule(picks=st.lists(st.integers(0, len(PROMPTS) * len(ASKED) - 1), min_size=1, max_size=5))
    def add(self, picks: list[int]) -> None:
        for prompt, asked in (divmod(pick, len(ASKED)) for pick in picks):
            params = params_of(asked, self.llm.drafters[-1])
            requests = self.llm.prepare(PROMPTS[prompt], params)
            self.llm.owner.enqueue(requests)
            wanted = alone(self.kind, prompt, asked)
            self.requests += zip(requests, wanted, [[] for _ in wanted], strict=True)
            COUNTS["add"] += 1

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.llm.engine.has_work:
                return self.add([count])
            self.llm.owner.step()
            COUNTS["step"] += 1
            self.nothing_is_wrong()

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        """Which are alive depends on time, and a strategy may not."""
        if not self.requests:
            return
        request = self.requests[pick % len(self.requests)][0]
        self.llm.owner.release([request])
        self.requests = [item for item in self.requests if item[0] is not request]
        COUNTS["abort"] += 1

    @rule()
    def preempt(self) -> None:
        """The next reservation finds no room: the youngest gives way, if there are two."""
        if len(self.llm.engine.scheduler.running) > 1:
            planted = OutOfBlocksError("planted")
            with self.fault(self.llm.engine.cache, "reserve", planted, 1, 1):
                self.llm.owner.step()
            COUNTS["preempt"] += 1

    @rule(
        seam=st.sampled_from(sorted(SEAMS)),
        first=st.sampled_from([1, 1, 2, 3]),
        times=st.sampled_from([1, 1, 2, 3, 4, 9, 1 << 30]),
        kind=st.sampled_from([RuntimeError, RuntimeError, KeyboardInterrupt]),
        steps=st.integers(1, 3),
    )
    def fail(
        self, seam: str, first: int, times: int, kind: type[BaseException], steps: int
    ) -> None:
        """Some of the calls at a seam fail. What fails once costs nobody the rest of a text."""
        owner, name = SEAMS[seam](self.llm)
        if owner is None:  # it has no states
            return
        if times > 1 or seam in ("commit", "scoring"):
            self.may_fail |= {request.seq.seq_id for request, *_ in self.requests}
        self.forgot |= seam == "forget"
        if seam == "commit":  # which undoes steps, too
            first = times = 1
        if seam == "allocation" and kind is RuntimeError:
            kind = torch.OutOfMemoryError
        with self.fault(owner, name, kind("planted"), first, times):
            for _ in range(steps):
                with suppress(EngineLostError, KeyboardInterrupt):
                    self.llm.owner.step()
        COUNTS[f"fail {seam}"] += 1

    @rule(pick=st.integers(0, 9))
    def poison(self, pick: int) -> None:
        """Every forward over one sequence fails: it ends, alone."""
        running = self.llm.engine.scheduler.running
        if not running:
            return
        poisoned = running[pick % len(running)].seq_id
        self.may_fail.add(poisoned)

        def when(_: Fault, batch: Any, *__: Any) -> bool:
            return any(span.seq_id == poisoned for span in batch.spans)

        with self.fault(self.llm.engine, "target", RuntimeError("planted"), when=when):
            self.llm.owner.step()
        COUNTS["poison"] += 1

    @contextmanager
    def fault(
        self,
        owner: Any,
        name: str,
        error: BaseException,
        first: int = 1,
        times: int = 1,
        when: Any = None,
    ) -> Iterator[None]:
        before = getattr(owner, name)
        Fault(owner, name, when or (lambda f, *_: first <= f.calls < first + times), error)
        try:
            yield
        finally:
            setattr(owner, name, before)

    @precondition(lambda self: self.llm is not None and self.taken)
    @rule(count=st.integers(1, 8))
    def grow(self, count: int) -> None:
        for block in self.taken[:count]:
            self.llm.engine.cache.pool.release(block)
        del self.taken[:count]
        COUNTS["grow"] += 1

    @rule(count=st.integers(1, 8))
    def shrink(self, count: int) -> None:
        """Somebody takes blocks that no sequence has; one sequence always fits."""
        pool = self.llm.engine.cache.pool
        count = min(count, pool.available, pool.total - 8 - len(self.taken))
        if count > 0:
            self.taken += pool.allocate(count)
            COUNTS["shrink"] += 1

    @rule(chance=st.integers(0, 9))
    def drop(self, chance: int) -> None:
        """All is dropped; a prompt's blocks may stay in the cache."""
        if chance < 9:
            return self.step(chance)
        self.llm.owner.release([request for request, *_ in self.requests])
        self.requests = []
        assert not self.llm.engine.has_work
        COUNTS["drop"] += 1

    @rule(
        draft=st.sampled_from(DRAFTS),
        head=st.sampled_from(("", *REAL_HEADS)),
        length=st.sampled_from([3, "any"]),
        chance=st.integers(0, 9),
    )
    def reload(self, draft: str, head: str, length: int | str, chance: int) -> None:
        """All that runs is finished, and another engine takes over."""
        if chance < 9:
            return self.step(chance)
        self.teardown()
        self.llm.close()
        self.start.__wrapped__(self, self.kind, draft, head, length, 3, 4)
        COUNTS["reload"] += 1

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.llm is None:
            return
        engine = self.llm.engine
        held = engine.cache
        held._tables[-1] = type("Taken", (), {"blocks": self.taken, "digests": ()})()
        if held.states is not None:
            held.states._slots[-1] = {}
        try:
            check_cache(held)
        finally:
            del held._tables[-1]
            if held.states is not None:
                del held.states._slots[-1]
        known = [seq.seq_id for seq in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert len(known) == len(set(known)) and held._tables.keys() <= set(known)
        unfinished = []
        for request, wanted, streamed in self.requests:
            seq = request.seq
            made = seq.tokens[seq.prompt_length :]
            streamed.extend(request.events)
            request.events.clear()
            assert made == wanted.token_ids[: len(made)], "not plain decoding's tokens"
            if request.completion is None:
                unfinished.append((request, wanted, streamed))
                going_on = seq.seq_id in known and seq.cached < len(seq.tokens)
                assert going_on or seq.seq_id in [commit.seq_id for commit in engine.ready]
            else:
                self.check(request, wanted, streamed)
                self.ended.append(request)
        self.requests = unfinished

    def check(self, request: Request, wanted: Completion, streamed: list[Any]) -> None:
        done = request.completion
        assert done is not None
        assert "".join(event.text for event in streamed) == done.text
        assert [token for event in streamed for token in event.token_ids] == done.token_ids
        assert done.token_ids == request.seq.tokens[request.seq.prompt_length :]
        if done.finish_reason == "error":
            assert request.seq.seq_id in self.may_fail, done.error
        else:
            for name in ("token_ids", "text", "finish_reason"):
                assert getattr(done, name) == getattr(wanted, name), name
            for name in ("logprobs", "prompt_logprobs"):
                made, right = getattr(done, name), getattr(wanted, name)
                if made is not None and not plain(self.kind).target.backend.batch_invariant:
                    made, right = ([one and one.logprob for one in of] for of in (made, right))
                    right = pytest.approx(right, abs=1e-4)
                assert made == right, name

    def teardown(self) -> None:
        if self.llm is None:
            return
        engine = self.llm.engine
        for _ in range(50_000):
            if not engine.has_work:
                break
            self.llm.owner.step()
            COUNTS["last step"] += 1
        self.nothing_is_wrong()
        assert not self.requests
        pool = engine.cache.pool
        assert pool.available + len(self.taken) == pool.total
        keepers = engine.drafter, engine.controller, engine.predictions
        ids = {request.seq.seq_id for request in self.ended}
        left = list(kept(keepers, ids, "engine", {id(engine.cache)}))
        assert not left or self.forgot, left
        self.llm.owner.release(self.ended)
        self.ended = []
        assert not self.llm.owner.requests
        if EVENTS >= 10**5 and COUNTS["start"] % 100 == 0:
            seconds, held = time.process_time(), (held_memory() or 0) >> 20
            print(f"{COUNTS.total()} events, {seconds:.0f} s, {held} MiB", flush=True)


# 60 rules are some 180 events. Hypothesis keeps every choice of a run: 0.3 GB for 150,000 events.
@pytest.mark.broad
@pytest.mark.parametrize("part", range(-(-EVENTS // PART)))
def test_events(part: int) -> None:
    how = settings(
        max_examples=max(1, min(EVENTS, PART) // 3 // STEPS),
        stateful_step_count=STEPS,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Events, settings=how)
