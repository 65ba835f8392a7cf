"""A step commits for all or is undone; who fails ends alone, and the others never notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.engine.recovery import Failure
from paceline.errors import CacheMemoryError, EngineLostError
from paceline.request.completion import Completion, StreamEvent
from paceline.request.request import Request
from support.cache_invariants import check_cache
from support.faults import STAGES, Fault

PROMPTS = ["Once upon a time there was a little", "def add(a, b)", "The old house by the sea was"]
PARAMS = [
    SamplingParams(max_tokens=13, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, seed=5, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=13, temperature=0.8, seed=6, ignore_eos=True, stop=("qqqq",)),
]
Make = Callable[..., LLM]
DRAFTS = {"chain": "{draft}", "tree": "tree:{draft},nodes=6,width=3", "none": None}


@pytest.fixture(scope="module")
def plain(random_pair: tuple[str, str]) -> LLM:
    return LLM(random_pair[0], draft="none", dtype="float32", max_batch_size=1)


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[Completion]:
    """Each request decoded plainly and by itself."""
    return [plain.generate(*pair)[0] for pair in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture
def make(plain: LLM, random_pair: tuple[str, str]) -> Make:
    """Engines over the same weights, each with a cache, a scheduler and a drafter of its own."""

    def made(kind: str, **options: Any) -> LLM:
        draft = DRAFTS[kind]
        spec = None if draft is None else draft.format(draft=random_pair[1])
        options = {"max_batch_size": 4, "draft_length": 3} | options
        return plain.with_draft(spec, prefix_sharing=False, **options)

    return made


@pytest.fixture(params=DRAFTS)
def llm(make: Make, request: pytest.FixtureRequest) -> Iterator[LLM]:
    made = make(request.param)
    yield made
    assert not made.engine.has_work
    blocks = made.engine.cache
    assert blocks.pool.available == blocks.num_blocks
    check_cache(blocks)
    own = getattr(made.engine.drafter, "cache", blocks)
    assert own.pool.available == own.num_blocks


def prepared(llm: LLM) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
    return [request for number, pair in pairs for request in llm.prepare(*pair, number)]


def run(llm: LLM) -> tuple[list[Request], list[list[StreamEvent]]]:
    """All requests together, as streams; step by step."""
    requests = prepared(llm)
    llm.owner.enqueue(requests)
    return requests, finish(llm, requests)


def finish(llm: LLM, requests: list[Request]) -> list[list[StreamEvent]]:
    for _ in range(400):
        if all(request.completion is not None for request in requests):
            break
        llm.owner.step()
    llm.owner.release(requests)
    return [list(request.events) for request in requests]


def check(request: Request, events: list[StreamEvent], alone: Completion) -> None:
    """A request's completion and its events are those of the request decoded alone."""
    done = request.completion
    assert done is not None and done.finish_reason == alone.finish_reason
    assert done.error is None
    assert done.token_ids == alone.token_ids and done.text == alone.text
    assert [t for event in events for t in event.token_ids] == alone.token_ids
    assert "".join(event.text for event in events) == alone.text
    if alone.logprobs is not None:
        assert done.logprobs is not None
        assert [entry.token_id for entry in done.logprobs] == alone.token_ids
    assert len(done.draft_mask) == len(done.token_ids)


def check_failed(request: Request, events: list[StreamEvent], alone: Completion) -> None:
    """It ended with an error; what it had by then is a beginning of its text alone."""
    done = request.completion
    assert done is not None and done.finish_reason == "error"
    assert done.error and "\n" not in done.error
    assert done.token_ids == alone.token_ids[: len(done.token_ids)]
    assert alone.text.startswith(done.text.rstrip("\ufffd"))
    assert [t for event in events for t in event.token_ids] == done.token_ids
    assert "".join(event.text for event in events) == done.text
    assert events[-1].completion is done


@pytest.mark.parametrize("call", [1, pytest.param(4, marks=pytest.mark.broad)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_that_does_not_come_back_is_a_line_in_the_log(
    llm: LLM, alone: list[Completion], stage: str, call: int, caplog: pytest.LogCaptureFixture
) -> None:
    error = torch.OutOfMemoryError("planted") if stage == "allocation" else RuntimeError("planted")
    fault = Fault(*STAGES[stage](llm), lambda own, *_: own.calls == call, error)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        requests, events = run(llm)
    assert fault.raised == 1
    assert len(caplog.records) == 1 and "planted" in caplog.text
    for request, own, expected in zip(requests, events, alone, strict=True):
        check(request, own, expected)


@pytest.mark.parametrize("stage", ["forward", "verify", "batch"])
def test_what_fails_for_one_request_ends_that_one(
    llm: LLM, alone: list[Completion], stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second request fails whenever it takes part, from its fourth token on."""
    victim: list[Request] = []

    def takes_part(_: Fault, first: Any, *rest: Any) -> bool:
        seq = victim[0].seq if victim else None
        if seq is None or seq.generated < 4:
            return False
        named = first.spans if stage == "forward" else first if stage == "batch" else rest[0]
        ids = [getattr(entry, "seq_id", None) or entry.seq.seq_id for entry in named]
        return seq.seq_id in ids

    Fault(*STAGES[stage](llm), takes_part, RuntimeError("planted"))
    requests = prepared(llm)
    victim.append(requests[1])
    llm.owner.enqueue(requests)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        events = finish(llm, requests)
    check_failed(requests[1], events[1], alone[1])
    assert len(requests[1].completion.token_ids) >= 4  # type: ignore[union-attr]
    for place in (0, 2):
        check(requests[place], events[place], alone[place])
    assert sum("ends with an error" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("where", ["text", "stops", "grammar", "blocks"])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_text_or_grammar_that_fails_takes_nobody_along(
    llm: LLM, alone: list[Completion], where: str, at: int
) -> None:
    """In the commit itself, where others have their tokens already, or behind it."""

    class Grammar:
        def consume(self, tokens: tuple[int, ...]) -> None:
            raise RuntimeError("planted")

        def allowed_tokens(self, path: tuple[int, ...]) -> None:
            return None

        def is_allowed(self, path: tuple[int, ...], token: int) -> bool:
            return True

        def forced_tokens(self, path: tuple[int, ...] = ()) -> tuple[int, ...]:
            return ()

    requests = prepared(llm)
    seq = requests[1].seq
    if where in ("text", "stops"):
        seq.stops = requests[1]._stream if where == "stops" else None
        Fault(requests[1]._stream, "push", lambda own, *_: own.calls == at, RuntimeError("planted"))
    elif where == "grammar":
        seq.constraint = Grammar()
    else:
        mine = [0]

        def third(_: Fault, seq_id: int, *rest: Any) -> bool:
            mine[0] += seq_id == seq.seq_id
            return seq_id == seq.seq_id and mine[0] == min(at, 3)

        Fault(llm.engine.cache, "commit", third, RuntimeError("planted"))
    llm.owner.enqueue(requests)
    events = finish(llm, requests)
    check_failed(requests[1], events[1], alone[1])
    for place in (0, 2):
        check(requests[place], events[place], alone[place])


@pytest.mark.parametrize("stage", ["propose", "observe"])
@pytest.mark.parametrize("start", [1, 3])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_drafter_that_always_fails_costs_speed_alone(
    make: Make, alone: list[Completion], stage: str, start: int, kind: str
) -> None:
    llm = make(kind)
    fault = Fault(*STAGES[stage](llm), lambda own, *_: own.calls >= start, ValueError("planted"))
    requests, events = run(llm)
    for request, own, expected in zip(requests, events, alone, strict=True):
        check(request, own, expected)
    assert 1 <= fault.raised <= 2, "it must be left alone from then on"
    assert not any(request.seq.drafts for request in requests)
    assert llm.engine.cache.pool.available == llm.engine.cache.num_blocks
    (later,) = llm.prepare(*next(zip(PROMPTS, PARAMS, strict=True)))
    assert later.seq.drafts, "a new request may try"


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_request_that_fails_with_nobody_beside_it_ends_alone(
    random_pair: tuple[str, str], backend: str
) -> None:
    """Whether forwards still run is tried on another batch, outside the step's inference mode."""
    llm = LLM(random_pair[0], "none", dtype="float32", max_batch_size=1, backend=backend)
    right = llm.generate(PROMPTS[0], PARAMS[0])
    requests = llm.prepare(PROMPTS[0], PARAMS[0]) + llm.prepare(PROMPTS[0], PARAMS[0])
    first = requests[0].seq.seq_id

    def takes_part(_: Fault, batch: Any, *__: Any) -> bool:
        return any(span.seq_id == first for span in batch.spans)

    Fault(llm.engine, "target", takes_part, RuntimeError("planted"))
    llm.owner.enqueue(requests)
    finish(llm, requests)
    assert [one.completion.finish_reason for one in requests] == ["error", "length"]  # type: ignore[union-attr]
    assert requests[1].completion.token_ids == right[0].token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("calls", [1, 4])
def test_when_every_forward_fails_all_requests_end_and_it_is_said(llm: LLM, calls: int) -> None:
    fault = Fault(llm.engine, "target", lambda own, *_: own.calls >= calls, RuntimeError("lost"))
    requests = prepared(llm)
    llm.owner.enqueue(requests)
    with pytest.raises(EngineLostError, match=r"every forward fails .RuntimeError: lost"):
        finish(llm, requests)
    for request in requests:
        assert request.completion is not None and request.completion.finish_reason == "error"
        assert request.events[-1].completion is request.completion
    assert not llm.engine.has_work
    llm.owner.release(requests)
    # A caller who asks again is told again; and if the device comes back, it is served.
    with pytest.raises(EngineLostError):
        llm.generate(PROMPTS[0], PARAMS[0])
    fault._when = lambda *_: False
    assert llm.generate(PROMPTS[0], PARAMS[0])[0].finish_reason == "length"


def test_a_cache_that_cannot_hold_one_sequence_ends_that_one(
    llm: LLM, alone: list[Completion]
) -> None:
    requests = prepared(llm)

    def third(_: Fault, seq: Any, *rest: Any) -> bool:
        return seq is requests[2].seq

    Fault(llm.engine.scheduler, "_reserve", third, CacheMemoryError("it cannot hold one"))
    llm.owner.enqueue(requests)
    events = finish(llm, requests)
    assert requests[2].completion is not None
    assert requests[2].completion.error == "it cannot hold one"
    check_failed(requests[2], events[2], alone[2])
    for place in (0, 1):
        check(requests[place], events[place], alone[place])


@pytest.mark.parametrize("call", [1, pytest.param(3, marks=pytest.mark.broad)])
@pytest.mark.parametrize("stage", [*STAGES, "push", "commit", "forget"])
def test_an_interrupt_passes_and_the_next_step_goes_on(
    llm: LLM, alone: list[Completion], stage: str, call: int
) -> None:
    error = KeyboardInterrupt() if call == 1 else SystemExit(3)
    requests = prepared(llm)
    owner = {
        "push": (requests[2].seq.stops, "push"),
        "commit": (llm.engine.cache, "commit"),
        "forget": (llm.engine.drafter, "forget"),
    }
    place = owner[stage] if stage in owner else STAGES[stage](llm)
    fault = Fault(*place, lambda own, *_: own.calls == call, error)
    llm.owner.enqueue(requests)
    with pytest.raises(type(error)):
        finish(llm, requests)
    llm.owner.requests.update({request.seq.seq_id: request for request in requests})
    events = finish(llm, requests)
    assert fault.raised == 1
    broken = 0
    for request, own, expected in zip(requests, events, alone, strict=True):
        assert request.completion is not None
        if stage in owner and request.completion.finish_reason == "error":
            broken += 1  # it was in the middle of its own commit
            check_failed(request, own, expected)
        else:
            check(request, own, expected)
    assert broken <= 1


def test_scores_that_are_no_numbers_end_their_own_request(
    llm: LLM, alone: list[Completion]
) -> None:
    requests = prepared(llm)
    real = llm.engine.verifier

    def spoilt(logits: torch.Tensor, checks: Any, greedy: list[int] | None) -> Any:
        logits = logits.clone()
        for check in checks:
            if check.seq.seq_id == requests[1].seq.seq_id and check.seq.generated >= 5:
                rows = slice(check.start, check.start + check.rows)
                logits[rows] = float("nan")
                if greedy is not None:
                    greedy[rows] = [-1] * check.rows
        return real(logits, checks, greedy)

    llm.engine.verifier = spoilt  # type: ignore[assignment]
    llm.owner.enqueue(requests)
    events = finish(llm, requests)
    check_failed(requests[1], events[1], alone[1])
    assert len(events[1][-1].completion.token_ids) >= 5  # type: ignore[union-attr]
    for place in (0, 2):
        check(requests[place], events[place], alone[place])


def test_a_text_that_cannot_be_given_out_ends_its_own_request(
    llm: LLM, alone: list[Completion]
) -> None:
    """Behind the engine: when the commit is turned into an event."""
    requests = prepared(llm)
    Fault(requests[1]._stream, "take", lambda own, *_: own.calls == 2, ValueError("planted"))
    llm.owner.enqueue(requests)
    events = finish(llm, requests)
    check_failed(requests[1], events[1], alone[1])
    for place in (0, 2):
        check(requests[place], events[place], alone[place])


def test_generate_returns_the_failed_with_the_others(llm: LLM, alone: list[Completion]) -> None:
    real = llm.engine._build_commit

    def made(seq: Any, *rest: Any) -> Any:
        if seq.params is PARAMS[2]:
            raise RuntimeError("planted\nin two lines")
        return real(seq, *rest)

    llm.engine._build_commit = made  # type: ignore[method-assign]
    done = llm.generate(PROMPTS, PARAMS)
    assert [one.finish_reason for one in done] == ["length", "length", "error"]
    assert done[2].error == "RuntimeError: planted in two lines"
    assert [one.token_ids for one in done[:2]] == [one.token_ids for one in alone[:2]]


def test_a_failure_is_one_line_and_says_where() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        failure = Failure.of(error)
    assert failure.message == "ValueError: a b"
    assert str(failure).startswith("ValueError: a b (test_recovery.py:")
    assert Failure.of(CacheMemoryError("no room")).message == "no room"
    assert Failure.of(KeyboardInterrupt()).message == "KeyboardInterrupt"


def test_a_clock_set_back_makes_no_time_negative(
    make: Make, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    moment = [2e9]

    def backwards() -> float:
        moment[0] -= 3600.0
        return moment[0]

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(backwards() * 1e9))
    llm = make("chain", draft_length="auto")
    requests, events = run(llm)
    for request, own, expected in zip(requests, events, alone, strict=True):
        check(request, own, expected)
        stats = request.completion.stats  # type: ignore[union-attr]
        assert stats.decode_seconds > 0 and 0 <= stats.time_to_first_token < 600
        moments = [moment for moment, _ in stats.arrivals]
        assert moments == sorted(moments) and moments[0] >= 0
    assert all(seconds >= 0 for seconds in llm.engine.clock.seconds.values())
