"""Limits and failures: full queues, deadlines, draining, a step that fails."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM
from paceline.core.params import Grammar, SamplingParams
from paceline.errors import CacheMemoryError, GrammarError
from paceline.request.grammar import GrammarCompiler
from paceline.server import wire
from paceline.server.local import EngineThread
from paceline.server.loop import EngineLoop
from support import asking
from support.running_server import MODEL, Running, serve, service_of


@pytest.fixture
def small(target: LLM) -> Iterator[Running]:
    """One sequence at a time, one that may wait."""
    llm = target.with_draft("paceline/tiny-draft", draft_length=2, max_batch_size=1)
    yield from serve(service_of(llm, max_queue=1))


def ask(server: Running, **fields: Any) -> tuple[int, Any, Any]:
    """(status, headers, body) of a completion."""
    body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, **fields}
    answer = asking.ask(server.url, "/v1/completions", body)
    shown = answer.text if answer.status == 200 else answer.json
    return answer.status, answer.headers, shown


def in_background(server: Running, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(ask(server, **fields)))
    thread.start()
    return thread, outcome


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """Holds every step of the target until it is opened: nothing depends on how fast this is."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        engine = server.service.client.engine.llm.engine
        step = engine.step

        def delayed() -> Any:
            self.open.wait(30)
            return step()

        monkeypatch.setattr(engine, "step", delayed)


def test_a_full_queue_says_when_to_come_again(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(small, monkeypatch)
    scheduler = small.service.client.engine.llm.engine.scheduler
    threads = [in_background(small, max_tokens=8)]
    wait_until(lambda: small.service.client.engine.loop.waiting + len(scheduler.running) == 1)
    threads.append(in_background(small, max_tokens=8))
    wait_until(lambda: small.service.client.engine.loop.waiting + len(scheduler.running) == 2)
    status, headers, body = ask(small, max_tokens=8)
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert body["error"]["code"] == "queue_full" and "the queue is full" in body["error"]["message"]
    gate.open.set()
    for thread, outcome in threads:
        thread.join(30)
        assert outcome[0][0] == 200
    assert ask(small, max_tokens=8)[0] == 200


def load(server: Running, path: str = "/load") -> dict[str, Any]:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return json.loads(answer.read())


def test_load_counts_what_is_under_way(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the engine is in the middle of a step, and under the names that routers know."""
    empty = {"server_load": 0, "load": 0, "sequences": 0, "capacity": 2, "ready": True}
    assert load(small) == empty
    gate = Gate(small, monkeypatch)
    thread, outcome = in_background(small, max_tokens=8, n=2)
    wait_until(lambda: load(small)["sequences"] == 2)
    assert load(small, "/get_load") == {**empty, "server_load": 1, "load": 1, "sequences": 2}
    gate.open.set()
    thread.join(30)
    assert outcome[0][0] == 200
    wait_until(lambda: load(small) == empty)


def test_deadlines(
    small: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.server")
    engine = small.service.client.engine.llm.engine
    step = engine.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    status, _, body = ask(small, max_tokens=500, ignore_eos=True, deadline=0.5)
    assert status == 408 and body["error"]["code"] == "deadline_exceeded"
    with monkeypatch.context() as patch:
        config = replace(small.service.config, deadline=0.5)
        patch.setattr(small.service.client, "config", config)
        status, _, body = ask(small, max_tokens=500, ignore_eos=True)
        assert status == 504 and "the server's deadline" in body["error"]["message"]
    status, _, text = ask(small, max_tokens=500, ignore_eos=True, deadline=0.5, stream=True)
    assert status == 200
    last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")][-1]
    assert last["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in text
    pool = engine.cache.pool
    wait_until(lambda: pool.available == pool.total)
    # The log says how many tokens there were, also of what was not streamed.
    line = re.compile(r"POST /v1/completions (?:408|504) [\d.]+ s [1-9]\d* tokens")
    wait_until(lambda: len(list(filter(line.fullmatch, caplog.messages))) == 3)


def test_draining(small: Running) -> None:
    def health(path: str) -> int:
        try:
            with urllib.request.urlopen(f"{small.url}/health{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert health("") == health("/live") == health("/ready") == 200
    assert load(small)["ready"]
    small.service.client.drain()
    assert health("/ready") == 503 and not load(small)["ready"]
    assert health("") == health("/live") == 200
    status, _, body = ask(small)
    assert status == 503 and body["error"]["code"] == "shutting_down"


ANSWERED = {wire.Done, wire.StepEvents}


def answer_to_one_token(llm: LLM, ready: threading.Event) -> tuple[EngineLoop, wire.WireMessage]:
    """A loop that has run from ``ready`` on, and what it says of a request beside accepting it."""
    posted: queue.Queue[wire.WireMessage] = queue.Queue()
    loop = EngineLoop(llm, posted.put)
    loop.handle(wire.Submit(1, [[1, 2, 3]], SamplingParams(max_tokens=1), True))
    assert ready.wait(20)
    loop.start()
    try:
        first = posted.get(timeout=20)
        return loop, posted.get(timeout=20) if first == wire.Done(1) else first
    finally:
        loop.stop()


def test_a_step_under_way_may_finish_a_request_before_it_is_prepared(
    target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, finished = target.with_draft(max_batch_size=1), threading.Event()
    enqueue = llm.owner.enqueue

    def taken_in_at_once(requests: Any) -> None:
        enqueue(requests)
        llm.owner.step()
        assert requests[0].completion is not None and not llm.engine.has_work
        finished.set()

    monkeypatch.setattr(llm.owner, "enqueue", taken_in_at_once)
    loop, answer = answer_to_one_token(llm, finished)
    assert isinstance(answer, wire.StepEvents)
    ((ticket, event),) = answer.events
    assert ticket == 1 and event.completion is not None and len(event.token_ids) == 1
    assert loop.waiting == 0


def test_a_request_that_an_idle_engine_refuses_late_is_told(
    target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, refused = target.with_draft(max_batch_size=1), threading.Event()

    def refuse(seq: Any) -> None:
        refused.set()
        raise CacheMemoryError("the cache is another one now")

    monkeypatch.setattr(llm.engine, "add", refuse)
    loop, answer = answer_to_one_token(llm, refused)
    assert isinstance(answer, wire.Ended) and "another one now" in str(answer.error)
    assert loop.waiting == 0


@pytest.mark.parametrize("slow", ["receipt", "grammar", "adapter"])
def test_what_takes_long_to_prepare_holds_up_no_other_request(
    target: LLM, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A first receipt reads all weights, a large grammar is compiled, an adapter is loaded."""
    ready = threading.Event()

    def slowly(*_: Any, **__: Any) -> Any:
        assert ready.wait(20)
        if slow == "grammar":
            raise GrammarError("that took long")
        return "hash"

    llm = target.with_draft(max_batch_size=2)
    monkeypatch.setattr("paceline.request.receipt._hash_of_files", slowly)
    monkeypatch.setattr(GrammarCompiler, "matcher", slowly)
    monkeypatch.setattr(llm.adapters, "load", slowly)
    posted: queue.Queue[wire.WireMessage] = queue.Queue()
    loop = EngineLoop(llm, posted.put)
    grammar = Grammar("regex", "a") if slow == "grammar" else None
    params = SamplingParams(max_tokens=1, receipt=slow == "receipt", grammar=grammar)
    submit = wire.Submit(1, [[1, 2, 3]], params, False)
    loop.handle(wire.SetAdapter(1, "a", "folder") if slow == "adapter" else submit)
    loop.handle(wire.Submit(2, [[1, 2, 3]], SamplingParams(max_tokens=1), False))
    loop.start()
    try:
        others = [posted.get(timeout=20) for _ in range(2)]
        assert wire.Done(2) in others and {type(one) for one in others} == ANSWERED
        ready.set()
        said = [posted.get(timeout=20) for _ in range(2 if slow == "receipt" else 1)]
    finally:
        ready.set()
        loop.stop()
    if slow == "adapter":
        assert said == [wire.Done(1)]
    elif slow == "grammar":
        assert isinstance(said[0], wire.Ended) and "took long" in str(said[0].error)
    else:
        assert wire.Done(1) in said and {type(one) for one in said} == ANSWERED
        ((_, event),) = next(one for one in said if isinstance(one, wire.StepEvents)).events
        assert event.completion is not None and event.completion.receipt is not None
        assert event.completion.receipt["weights"] == "hash"


def test_an_engine_thread_lets_go_of_its_connection(target: LLM) -> None:
    """Whether it was started or not, and however often it is closed."""
    for starts in (False, True):
        engine = EngineThread(target.with_draft(max_batch_size=1))
        if starts:
            engine.start()
        engine.close()
        assert engine._connection.fileno() == engine._engine_end.fileno() == -1
        assert not engine._reader.is_alive()
        engine.close()


def test_stop_strings_never_leak(server: Running) -> None:
    """Also not the beginning of one that later turns out to be none."""
    plain = json.loads(ask(server, max_tokens=60)[2])["choices"][0]["text"]
    for start in range(2, len(plain) - 8, 7):
        stop = plain[start : start + 5]
        expected = plain[: plain.index(stop)]
        status, _, text = ask(server, max_tokens=60, stop=stop, stream=True)
        assert status == 200
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        shown = ""
        for chunk in chunks:
            shown += chunk["choices"][0]["text"]
            assert expected.startswith(shown)
        assert shown == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["größer 漢字 🙂👍🏽", "日本語 עברית", "e\u0301 ﷽"])
def test_characters_are_never_cut(server: Running, text: str) -> None:
    """A grammar makes the model write them; every chunk is whole characters."""
    schema = {"const": text}
    params = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"max_tokens": 120, "response_format": params}
    whole = json.loads(ask(server, **fields)[2])["choices"][0]["text"]
    stream = ask(server, **fields, stream=True)[2]
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == whole
    assert json.loads(whole) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_usage_counts(server: Running) -> None:
    tokenizer = server.service.client.engine.llm.tokenizer
    prompts = ["Once upon a time", "The dog"]
    lengths = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        fields = {"prompt": prompts, "n": 2, "max_tokens": 7, "ignore_eos": True}
        _, _, text = ask(server, **fields, stream=stream, **options)
        if stream:
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            usage = json.loads(lines[-1])["usage"]
            assert {json.loads(line)["usage"] is None for line in lines[:-1]} == {True}
        else:
            answer = json.loads(text)
            usage = answer["usage"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert usage.pop("prompt_tokens_details")["cached_tokens"] <= usage["prompt_tokens"]
        assert usage == {
            "prompt_tokens": lengths,
            "completion_tokens": 28,
            "total_tokens": lengths + 28,
        }
