"""Many streams at once, some of which hang up: all other texts, and every block, must be right.

``PACELINE_LOAD_SECONDS`` says for how long (6 by default; the full check is 60).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline import LLM
from support.running_server import MODEL, Running, serve, service_of

SECONDS = float(os.environ.get("PACELINE_LOAD_SECONDS", "6"))
STREAMS = 32
PROMPTS = (
    "Once upon a time",
    "The little dog ran to",
    "def add(a, b):\n",
    "A very long day began when the old king " * 6,
)


@pytest.fixture(scope="module")
def busy(target: LLM) -> Iterator[Running]:
    drafts = ["paceline/tiny-draft", "ngram", "suffix"]
    llm = target.with_draft(drafts, draft_length=4, max_batch_size=12, kv_cache_memory=24 * 2**20)
    yield from serve(service_of(llm, max_queue=STREAMS))


async def post(server: Running, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """(status, reader, writer) of a request over a connection of its own."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status, reader, writer


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, until [DONE]; the framing of HTTP's chunks is skipped."""
    async for line in reader:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
        elif line.startswith(b"data: [DONE]"):
            return


@dataclass
class Tally:
    whole: int = 0
    cut: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)


def params(chooser: random.Random) -> dict[str, Any]:
    """One of few enough requests that each is sent several times."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": chooser.choice(PROMPTS),
        "max_tokens": chooser.choice((8, 40)),
        "temperature": chooser.choice((0.0, 1.0)),
        "seed": chooser.choice((1, 2)),
        "stream": True,
        "speculation": {"drafter": chooser.choice(("auto", "none", "ngram", "suffix"))},
    }
    kind = chooser.random()
    if kind < 0.1:
        body["response_format"] = {"type": "json_object"}
    elif kind < 0.2:
        body["stop"] = ["the", "\n"]
    elif kind < 0.25:
        body["prompt"] = "word " * 3000  # too long
    elif kind < 0.3:
        schema = {"name": "x", "schema": {"type": "strange"}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def key_of(body: dict[str, Any]) -> str:
    """Equal for requests that must have the same text: whatever drafts, and streamed or not."""
    rest = {name: value for name, value in body.items() if name not in ("speculation", "stream")}
    if body["temperature"] == 0:
        rest.pop("seed")
    return json.dumps(rest, sort_keys=True)


async def client(server: Running, number: int, end: float, tally: Tally) -> None:
    chooser = random.Random(number)
    while time.monotonic() < end:
        body = params(chooser)
        status, reader, writer = await post(server, "/v1/completions", body)
        bad = len(body["prompt"]) > 5000 or "json_schema" in body.get("response_format", {})
        if bad or status != 200:
            tally.refused += 1
            if status not in ((400,) if bad else (429,)):
                tally.failed.append(f"status {status} for {body}")
            writer.close()
            if status == 429:
                await asyncio.sleep(0.05)
            continue
        patience = chooser.choice((1, 3)) if chooser.random() < 0.4 else 10**6
        text, seen, finished = "", 0, False
        async for chunk in chunks(reader):
            if "error" in chunk:
                tally.failed.append(str(chunk))
                break
            text += chunk["choices"][0]["text"]
            finished = chunk["choices"][0]["finish_reason"] is not None
            seen += 1
            if seen >= patience:
                break
        writer.close()
        if finished:
            tally.whole += 1
            tally.texts.setdefault(key_of(body), set()).add(text)
        else:
            tally.cut += 1


async def storm(server: Running) -> Tally:
    tally, end = Tally(), time.monotonic() + SECONDS
    await asyncio.gather(*(client(server, number, end, tally) for number in range(STREAMS)))
    return tally


def settle(server: Running) -> None:
    """Wait until the engine has nothing left to do."""
    end = time.monotonic() + 30
    while not (server.service.client.idle and not server.service.client.engine.llm.engine.has_work):
        assert time.monotonic() < end, "requests were left behind"
        time.sleep(0.02)


@pytest.mark.slow
def test_storm(busy: Running, target: LLM) -> None:
    tally = asyncio.run(storm(busy))
    assert tally.failed == []
    assert tally.whole > 20 and tally.cut > 5
    settle(busy)
    pool = busy.service.client.engine.llm.engine.cache.pool
    assert pool.available == pool.total, "blocks were lost"
    assert busy.service.client.alive
    assert not busy.service.client.engine.llm.owner.requests
    assert busy.service.client.idle and not busy.service.client.engine.loop._jobs
    # One request, one text: under load, alone, with speculation and without.
    assert len(tally.texts) > 10
    for key, texts in list(tally.texts.items())[:12]:
        body = {**json.loads(key), "speculation": {"drafter": "none"}, "stream": False}
        alone = asyncio.run(whole(busy, body))
        assert texts == {alone}, key


async def whole(server: Running, body: dict[str, Any]) -> str:
    status, reader, writer = await post(server, "/v1/completions", body)
    answer = json.loads(await reader.read())
    writer.close()
    assert status == 200, answer
    return answer["choices"][0]["text"]


def test_a_client_that_hangs_up_before_the_answer_is_cancelled(busy: Running) -> None:
    async def hang_up() -> None:
        body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 900, "ignore_eos": True}
        data = json.dumps(body).encode()
        host, port = busy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        end = time.monotonic() + 10
        while (
            not busy.service.client.engine.llm.engine.scheduler.running and time.monotonic() < end
        ):
            await asyncio.sleep(0.01)
        assert busy.service.client.engine.llm.engine.scheduler.running
        writer.close()

    steps = busy.service.client.engine.llm.engine.steps
    asyncio.run(hang_up())
    settle(busy)
    assert busy.service.client.engine.llm.engine.steps - steps < 800
    pool = busy.service.client.engine.llm.engine.cache.pool
    assert pool.available == pool.total
