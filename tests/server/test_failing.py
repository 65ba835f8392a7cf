"""An engine that fails, hangs or is lost: nobody waits for ever, and the server says so."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import LLM
from paceline.control.controller import PLAIN
from paceline.errors import EngineLostError
from paceline.server import run
from paceline.server.security import Keys
from support.running_server import MODEL, Running, serve, service_of

SECRET = "CUDA error at /the/machine"


@pytest.fixture
def small(target: LLM) -> Iterator[Running]:
    llm = target.with_draft(max_batch_size=2, kv_cache_memory=2**20)
    yield from serve(service_of(llm, max_queue=8))


def ask(server: Running, **fields: Any) -> tuple[int, str]:
    """(status, body) of a completion."""
    body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return answer_of(request)


def answer_of(request: urllib.request.Request | str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def health(server: Running) -> dict[str, int]:
    return {path: answer_of(f"{server.url}/health{path}")[0] for path in ("", "/live", "/ready")}


def error_of(body: str) -> dict[str, Any]:
    """The error of an answer; of a stream that had begun, its last event."""
    if body.startswith("{"):
        return json.loads(body)["error"]
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
    assert "[DONE]" not in body
    return json.loads(lines[-1])["error"]


def break_steps(server: Running, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """From now on; what is running already is running when it fails."""

    def fail() -> Any:
        scheduler = server.service.client.engine.llm.engine.scheduler
        scheduler.plan(lambda seqs: [PLAIN] * len(seqs), lambda length: length)
        raise error

    monkeypatch.setattr(server.service.client.engine.llm.owner, "step", fail)


def test_a_step_that_raises_is_the_end(
    small: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine recovers from what it can; what comes out of it is a mistake of ours."""
    assert set(health(small).values()) == {200}
    break_steps(small, monkeypatch, RuntimeError(SECRET))
    status, body = ask(small, max_tokens=4)
    assert status == 503
    assert error_of(body)["type"] == "server_error" and SECRET not in body
    wait_until(lambda: set(health(small).values()) == {503})
    status, body = ask(small)
    assert status == 503 and json.loads(body)["error"]["code"] == "engine_lost"
    assert "RuntimeError" in str(small.service.client.failure)
    lines = [r for r in caplog.records if "the engine thread has ended" in r.message]
    assert len(lines) == 1 and "\n" not in lines[0].message


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_gives_up(
    small: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    break_steps(small, monkeypatch, EngineLostError("every forward fails"))
    status, body = ask(small, stream=stream)
    assert status in ((200, 503) if stream else (503,))
    assert error_of(body)["code"] == "engine_lost"
    assert small.service.client.failure == "every forward fails"
    pool = small.service.client.engine.llm.engine.cache.pool
    assert pool.available == pool.total


@pytest.mark.parametrize("leaves", [False, True])
def test_a_stream_that_breaks_off_is_no_200_in_the_log(
    small: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leaves: bool,
) -> None:
    """Its first line said 200; then the engine was lost, or the client had gone."""
    caplog.set_level("INFO", "paceline.server")
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{small.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200 and answer.readline().startswith(b"data: {")
        if not leaves:
            break_steps(small, monkeypatch, EngineLostError("every forward fails"))
            assert error_of(answer.read().decode())["code"] == "engine_lost"

    def logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if "/v1/completions" in r.getMessage()]

    wait_until(lambda: bool(logged()))
    assert [line.split()[2] for line in logged()] == ["499" if leaves else "503"]


def test_the_process_ends_when_the_engine_is_lost(
    target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, so that a supervisor starts another; ``run`` raises, which is exit code 1."""
    service = service_of(target.with_draft(), drain_seconds=600)
    with run.bind("127.0.0.1", 0) as listener:
        failed: list[Exception] = []

        def serve_it() -> None:
            try:
                run.run(service, Keys(), listener)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=serve_it)
        thread.start()
        server = Running(run.url_of(listener, "127.0.0.1"), service)
        wait_until(lambda: service.client.ready)
        break_steps(server, monkeypatch, EngineLostError("every forward fails"))
        assert ask(server)[0] == 503
        thread.join(30)
        assert not thread.is_alive()
    (error,) = failed
    assert isinstance(error, EngineLostError)
    assert str(error).startswith("the engine has failed: every forward fails; the server has")


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_the_thread_s_death_is_told(
    small: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A bug of ours in the thread itself, with a request running and one waiting to be admitted."""

    def bug(*_: Any) -> None:
        raise AssertionError("never expected")

    monkeypatch.setattr(small.service.client.engine.loop, "_publish", bug)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(small, stream=stream))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for status, body in answers:
        assert status in ((200, 503) if stream else (503,))
        assert error_of(body)["code"] == "engine_lost"
    assert set(health(small).values()) == {503}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_hangs_does_not_hang_its_clients(
    small: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = threading.Event()
    llm = small.service.client.engine.llm
    step = llm.owner.step

    def hang() -> Any:
        gate.wait(300)  # longer than ``ask`` waits
        return step()

    monkeypatch.setattr(llm.owner, "step", hang)
    try:
        status, body = ask(small, deadline=0.2, stream=stream)
        assert status == (200 if stream else 408)
        assert error_of(body)["code"] == "deadline_exceeded"
    finally:
        gate.set()
    wait_until(lambda: small.service.client.idle)
    assert ask(small, max_tokens=4)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_alone(
    small: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The engine ends it with an error of its own; others of the same step are not touched."""
    llm = small.service.client.engine.llm
    step = llm.owner.step

    def fail_the_seeded() -> Any:
        advanced = step()
        for request, _ in advanced:
            if request.seq.params.seed == 7:
                llm.owner.release([request])
                request.completion = SimpleNamespace(finish_reason="error", error="not a law")
        return advanced

    monkeypatch.setattr(llm.owner, "step", fail_the_seeded)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(ask(small, max_tokens=30)))
    thread.start()
    status, body = ask(small, seed=7, n=2, stream=stream)
    error = error_of(body)
    assert status in ((200, 500) if stream else (500,))
    assert (error["message"], error["code"]) == ("not a law", "request_failed")
    thread.join(30)
    monkeypatch.undo()
    assert other[0][0] == 200
    choices = json.loads(other[0][1])["choices"]
    assert choices == json.loads(ask(small, max_tokens=30)[1])["choices"]
    pool = llm.engine.cache.pool
    wait_until(lambda: pool.available == pool.total)


# -- what else may not stop everything -------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/tokenize", {"prompt": "long"}, "encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "apply_chat_template"),
        ("/detokenize", {"tokens": [5, 6]}, "decode"),
    ],
)
def test_tokenizing_does_not_hold_up_others(
    small: Running,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    method: str,
) -> None:
    tokenizer = small.service.tokenizer
    gate, begun = threading.Event(), threading.Event()
    work = getattr(tokenizer, method)

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        gate.wait(60)
        return work(*arguments, **options)

    monkeypatch.setattr(tokenizer, method, slow)
    answers: list[Any] = []
    request = urllib.request.Request(
        f"{small.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    thread = threading.Thread(target=lambda: answers.append(answer_of(request)))
    thread.start()
    try:
        assert begun.wait(20)
        with urllib.request.urlopen(f"{small.url}/health", timeout=20) as answer:
            assert answer.status == 200
        assert not answers
    finally:
        gate.set()
        thread.join(20)
    assert answers[0][0] == 200


def test_refused_requests_have_not_waited_since_the_machine_was_started(target: LLM) -> None:
    """Refused by the cache, cancelled before they ran, or ended with the server."""
    began = time.perf_counter()
    llm = target.with_draft(max_batch_size=2, kv_cache_memory=400_000)
    for server in serve(service_of(llm, max_queue=8)):
        status, body = ask(server, prompt="word " * 300, max_tokens=600)
        assert status == 400, body
        text = answer_of(f"{server.url}/metrics")[1]
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    # Refused before it could wait for anything.
    assert ("paceline_requests_total", "error") not in samples
    assert samples["paceline_request_seconds_count", None] == 0
    assert samples["paceline_request_seconds_sum", None] <= time.perf_counter() - began


def test_those_that_never_ran_have_waited_since_they_came(
    target: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while they waited to run, and those that still wait at the end."""
    seen: list[tuple[float, str]] = []
    service = service_of(target.with_draft(max_batch_size=1), max_queue=8)
    metrics = service.client.engine.loop.metrics
    monkeypatch.setattr(
        metrics,
        "record_finished",
        lambda request, outcome: seen.append((request.seq.queued, outcome)),
    )
    gate = threading.Event()
    llm = service.client.engine.llm
    step = llm.owner.step
    monkeypatch.setattr(llm.owner, "step", lambda: (gate.wait(60), step())[1])
    began = time.perf_counter()
    for server in serve(service):
        threads = [
            threading.Thread(target=ask, args=(server,), kwargs={"deadline": seconds})
            for seconds in (0.05, 0.05, 30, 30)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: service.client.engine.loop.waiting >= 3)
        time.sleep(0.1)  # two deadlines are over
        gate.set()
        for thread in threads:
            thread.join(60)
    assert len(seen) == 4 and {"deadline"} <= {outcome for _, outcome in seen}
    assert all(began <= queued for queued, _ in seen)
