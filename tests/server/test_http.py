"""What HTTP itself has to say: paths, methods, types, encodings, ids of requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from paceline import LLM
from support.asking import ask
from support.running_server import MODEL, Running, serve, service_of

BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 2, "temperature": 0}
LIMIT = 10_000


@pytest.fixture(scope="module")
def small(target: LLM) -> Iterator[Running]:
    llm = target.with_draft(max_batch_size=2)
    origins = ("https://chat.example",)
    yield from serve(service_of(llm, max_queue=3, max_request_bytes=LIMIT, cors_origin=origins))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types(server: Running, kind: str) -> None:
    refused = ask(server.url, "/v1/completions", BODY, {"Content-Type": kind})
    assert refused.status == 415 and refused.error["code"] == "unsupported_media_type"
    assert kind in refused.error["message"] and "application/json" in refused.error["message"]
    given = {"Content-Type": "application/json; charset=utf-8"}
    assert ask(server.url, "/v1/completions", BODY, given).status == 200


def test_paths_and_methods(server: Running) -> None:
    for path in ("/health", "/health/ready", "/v1/models", "/"):
        head = ask(server.url, path, method="HEAD")
        assert (head.status, head.text) == (200, "")
    assert ask(server.url, "/v1/models/").json == ask(server.url, "/v1/models").json
    assert ask(server.url, "/v1/completions/", BODY).status == 200
    assert ask(server.url, "/health/").status == 200


def test_ids_of_requests(server: Running) -> None:
    assert (
        ask(server.url, "/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"]
        == "mine"
    )
    made = {ask(server.url, "/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("x" * 200, "two words"):
        assert (
            ask(server.url, "/health", headers={"X-Request-Id": bad}).headers["x-request-id"] != bad
        )


def test_pages_may_send_what_sdks_send(small: Running) -> None:
    wanted = "authorization,content-type,x-stainless-lang,x-stainless-os,x-title,http-referer"
    preflight = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "GET",
        "Access-Control-Request-Headers": wanted,
    }
    for path, method in (("/v1/chat/completions", "POST"), ("/v1/responses/x", "DELETE")):
        asked = {**preflight, "Access-Control-Request-Method": method}
        allowed = ask(small.url, path, None, asked, "OPTIONS")
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-headers"] == wanted
    other = ask(
        small.url, "/v1/models", None, {**preflight, "Origin": "https://x.example"}, "OPTIONS"
    )
    assert other.status == 400


def test_what_can_never_fit_is_refused_for_good(small: Running) -> None:
    fits = ask(small.url, "/v1/completions", {**BODY, "prompt": ["a"] * 5})
    assert fits.status == 200
    refused = ask(small.url, "/v1/completions", {**BODY, "prompt": ["a", "b", "c"], "n": 2})
    assert refused.status == 400 and refused.error["param"] == "n"
    assert "6 sequences" in refused.error["message"] and "accepts 5" in refused.error["message"]


def test_too_long_a_prompt_in_openai_s_sentence(server: Running) -> None:
    said = "This model's maximum context length is 1024 tokens. However, your "
    long = [{"role": "user", "content": "word " * 5000}]
    chat = ask(server.url, "/v1/chat/completions", {"model": MODEL, "messages": long})
    text = ask(server.url, "/v1/completions", {**BODY, "prompt": "word " * 5000})
    for answer, what in ((chat, "messages"), (text, "prompt")):
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert answer.error["message"].startswith(f"{said}{what} resulted in ")
        assert answer.error["param"] == what


def test_nothing_goes_out_before_the_first_output(server: Running) -> None:
    """Else a benchmark would take the role for the first token."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 3, "stream": True, "temperature": 0}
    chunks = ask(server.url, "/v1/chat/completions", body).chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1]["content"]
    assert sum("role" in delta for delta in deltas) == 1


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True}
PLAIN = {"prompt": "Once", "max_tokens": 2, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", PLAIN),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2, "stream": True}),
        ("/v1/messages", CHAT),
    ],
)
def test_nothing_goes_out_while_the_prompt_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    engine, read = server.service.client.engine.llm.engine, threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if read.wait(10) else None)
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
    answer = connection.getresponse()
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(answer.read1()))
    reader.start()
    reader.join(0.2)
    assert answer.status == 200 and not said
    read.set()
    reader.join(30)
    assert said and said[0].startswith((b"data: ", b"event: "))
    answer.read()
    connection.close()


def test_created_is_never_before_the_request(server: Running) -> None:
    before = time.time()
    created = ask(server.url, "/v1/completions", BODY).json["created"]
    assert before <= created <= time.time() + 1


def test_cached_tokens(server: Running) -> None:
    prompt = "A sentence that nobody has asked about before, " * 8
    counts = [
        ask(server.url, "/v1/completions", {**BODY, "prompt": prompt}).json["usage"]
        for _ in range(2)
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in counts]
    assert cached[0] == 0 and 0 < cached[1] < counts[1]["prompt_tokens"]


@pytest.mark.parametrize("special", [True, False])
def test_the_end_token_is_not_among_the_logprobs(
    server: Running, target: LLM, special: bool
) -> None:
    """It ended the text and is no part of it."""
    end = target.tokenizer.eos_token_id if special else 300
    ends = {"logit_bias": {str(end): 100}, "stop_token_ids": [end]}
    body = {**BODY, **ends, "max_tokens": 6, "logprobs": 1, "speculation": {"tokens": True}}
    answer = ask(server.url, "/v1/completions", body).json
    assert answer["choices"][0]["text"] == answer["choices"][0]["tokens"][0]["text"] == ""
    assert answer["choices"][0]["logprobs"]["tokens"] == []
    assert answer["usage"]["completion_tokens"] == 1
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, **ends, "logprobs": True}
    assert (
        ask(server.url, "/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
        == []
    )
    chunks = ask(server.url, "/v1/chat/completions", {**body, "stream": True}).chunks
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert not any(entry and entry["content"] for entry in entries)


@pytest.mark.parametrize("special", [True, False])
def test_an_included_end_token_is_among_the_logprobs(
    server: Running, target: LLM, special: bool
) -> None:
    end = target.tokenizer.eos_token_id if special else 300
    ends = {"logit_bias": {str(end): 100}, "stop_token_ids": [end]}
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    body = {**BODY, **ends, **shown, "logprobs": 1, "speculation": {"tokens": True}}
    choice = ask(server.url, "/v1/completions", body).json["choices"][0]
    text = target.tokenizer.decode([end])
    assert choice["text"] == choice["tokens"][0]["text"] == text != ""
    assert choice["logprobs"]["tokens"] == [text]
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, **ends, **shown, "logprobs": True}
    choice = ask(server.url, "/v1/chat/completions", body).json["choices"][0]
    assert choice["message"]["content"] == choice["logprobs"]["content"][0]["token"] == text
