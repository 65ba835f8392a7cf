"""The soak finds what it is there to find: servers that are wrong on purpose, each in one way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from soak.__main__ import tracebacks
from soak.answers import Answer
from soak.processes import Held, grown, held, tree
from soak.storm import Plan, Storm

OTHERS = frozenset({"extreme", "invalid", "deadline", "hostile", "others"})


@dataclass
class Fake:
    """Speaks as much of the API as the clients need. ``fault`` is what it does wrong."""

    fault: str = ""
    asked: int = 0
    running: int = 0
    steps: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, path, _ = head.split("\r\n")[0].split()
            length = head.lower().partition("content-length: ")[2].partition("\r\n")[0] or "0"
            body = json.loads(await reader.readexactly(int(length)) or b"{}")
            status, content = self.answer(path, body)
            if self.fault in ("hang", "slow") and self.asked == 20:
                self.asked += 1
                await asyncio.sleep(1.5 if self.fault == "slow" else 60)
            kind = "text/event-stream" if body.get("stream") else "application/json"
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
            )
            writer.write(content)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/models":
            card = {"id": "fake", "drafters": ["ngram"], "max_model_len": 99}
            return 200, json.dumps({"data": [card]}).encode()
        if path == "/tokenize":
            return 200, json.dumps({"tokens": list(range(90))}).encode()
        if path == "/metrics":
            used = 0.25 if self.fault == "blocks" else 0
            self.steps += self.fault == "slow"
            names = {"requests_running": 0, "requests_waiting": 0, "cache_usage_ratio": used}
            names["batch_size_count"] = self.steps
            return 200, "".join(f"paceline_{k} {v}\n" for k, v in names.items()).encode()
        if path.startswith("/health"):
            return (503 if self.fault == "health" and path.endswith("ready") else 200), b"{}"
        self.asked += 1
        if self.fault == "status" and self.asked == 20:
            return 500, b'{"error": {"message": "x", "code": null}}'
        chunks = self.chunks(body, "messages" in body)
        if self.fault == "late error" and self.asked == 20:
            chunks = [*chunks[:-1], {"error": {"message": "x", "code": None}}]
        if not body.get("stream"):
            return 200, json.dumps(chunks[0]).encode()
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        if self.fault != "cut" or self.asked < 20:
            lines.append("data: [DONE]\n\n")
        return 200, "".join(lines).encode()

    def chunks(self, body: dict[str, Any], chat: bool) -> list[dict[str, Any]]:
        own = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        drafter = own.pop("speculation")["drafter"]
        text = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        if body["temperature"] and "seed" not in body:
            text = os.urandom(3).hex()
        if self.fault == "text" and drafter == "ngram":
            text = text[::-1]
        reason = "stop" if self.fault == "reason" and body.get("stream") else "length"
        usage = {"completion_tokens": 9 if self.fault == "usage" and drafter == "ngram" else 8}

        def choice(said: str, end: str | None) -> dict[str, Any]:
            part = {"text": said}
            if chat:
                part = {"delta" if body.get("stream") else "message": {"content": said}}
            return {"index": 0, **part, "finish_reason": end, "logprobs": None}

        if not body.get("stream"):
            return [{"choices": [choice(text, reason)], "usage": usage}]
        parts = [choice(text[:5], None), choice(text[5:], reason)]
        chunks: list[dict[str, Any]] = [{"choices": [part]} for part in parts]
        return [*chunks, {"choices": [], "usage": usage}]


def findings(fault: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    async def storm() -> list[str]:
        fake = Fake(fault)
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        served = SimpleNamespace(port=server.sockets[0].getsockname()[1], process=process)
        plan = Plan("x", 1.0, clients=4, skip=OTHERS)
        judge = await Storm(plan, cast(Any, served), lambda line: None).run()
        assert judge.counts["distinct answers compared"] > 20
        return judge.findings

    if fault in ("hang", "slow"):
        monkeypatch.setattr("soak.storm.PATIENCE", 0.5)
    # What a response_format asks for, the fake does not do.
    monkeypatch.setattr("soak.requests.response_format", lambda chooser: {"type": "text"})
    return asyncio.run(storm())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("text", "another answer than alone: text of choice 0"),
        ("reason", "another answer than alone: reason of choice 0"),
        ("usage", "another answer than alone: usage"),
        ("status", "status 500, not 200"),
        ("late error", "against None"),
        ("cut", "the server hung up"),
        ("blocks", "25.0% of the cache blocks are in use"),
        ("health", "/health/ready at the end: status 503"),
        ("hang", "no answer, and 0 steps in the last of"),
    ],
)
def test_a_fault_is_found(fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(fault, monkeypatch)
    assert any(words in line for line in found), found


@pytest.mark.parametrize("fault", ["", "slow"])
def test_a_right_server_is_not_complained_about(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is slow, as long as it works."""
    assert findings(fault, monkeypatch) == []


ENTRY = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"logprob": -1.0}]}


def chat(text: str, **more: Any) -> Answer:
    message = {"content": text, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None, **more}
    return Answer.of([{"choices": [choice]}])


def call(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (chat("a"), chat("a"), None),
        (chat("a"), chat("b"), "text of choice 0"),
        (chat("a"), Answer(), "choices [0] against []"),
        (chat("", message=call("{}")), chat("", message=call("{ }")), "calls of choice 0"),
        (
            chat("a", logprobs={"content": [ENTRY]}),
            chat("a", logprobs={"content": [{**ENTRY, "bytes": [98]}]}),
            "bytes 0",
        ),
        (
            chat("a", logprobs={"content": [ENTRY]}),
            chat("a", logprobs={"content": [{**ENTRY, "logprob": -1.01}]}),
            "values of token 0",
        ),
        (
            chat("a", logprobs={"content": [ENTRY]}),
            chat("a", logprobs={"content": [{**ENTRY, "logprob": -1.00001}]}),
            None,
        ),
        (chat("a", logprobs={"content": [ENTRY]}), chat("a"), "1 tokens against 0"),
    ],
)
def test_differences(left: Answer, right: Answer, words: str | None) -> None:
    found = left.difference(right)
    assert found is None if words is None else words in (found or ""), found


def test_a_stream_is_the_same_as_the_whole() -> None:
    whole = chat("ab", message=call('{"x": 1}'), logprobs={"content": [ENTRY, ENTRY]})
    parts = [
        ({"content": "a"}, None, {"content": [ENTRY]}),
        ({"content": "b"}, None, None),
        (call('{"x'), None, {"content": [ENTRY]}),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]}, None, None),
        ({}, "stop", None),
    ]
    stream = Answer.of(
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}]}
        for delta, reason, logprobs in parts
    )
    assert stream.difference(whole) is None


def test_tracebacks_are_told_by_their_errors() -> None:
    start = "ERROR: Traceback (most recent call last):"
    log = ["fine", start, "  File x", "    y()", "ValueError: no", "fine", start, " z", "KeyError"]
    assert list(tracebacks(log)) == ["ValueError: no", "KeyError"]


def test_what_grows() -> None:
    before = Held(2, 500.0, 20, 30)
    assert grown([before, before]) == []
    assert grown([before, Held(1, 1011.0, 24, 33)]) == ["1 processes, 2 before"]
    assert len(grown([before, Held(2, 1013.0, 25, 34)])) == 3
    full = replace(before, memory=900.0)  # caches that fill in the first half
    assert grown([before, before, full, replace(before, memory=995.0)]) == []
    assert len(grown([before, before, full, replace(before, memory=997.0)])) == 1


def test_processes_are_those_of_the_tree() -> None:
    if not os.path.isdir("/proc"):
        pytest.skip("no /proc on this system")
    assert os.getpid() in tree(os.getppid())
    mine = held(os.getpid())
    assert mine.processes >= 1 and mine.threads >= 1 and mine.files >= 3 and mine.memory > 1
