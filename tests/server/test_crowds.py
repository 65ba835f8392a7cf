"""Thousands of connections and of tiny requests, and clients that do not read.

``PACELINE_TINY_REQUESTS`` says how many tiny ones (400 by default; the full check is 10000).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import LLM
from paceline.server import run
from support.running_server import MODEL, Running, serve, service_of

CONNECTIONS = 2000
TINY = int(os.environ.get("PACELINE_TINY_REQUESTS", "400"))


@pytest.fixture(scope="module")
def crowded(target: LLM) -> Iterator[Running]:
    yield from serve(service_of(target.with_draft(max_batch_size=16), max_queue=64))


def wait_until(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def settled(server: Running) -> None:
    """Nothing is left of all that."""
    wait_until(lambda: server.service.client.idle)
    llm = server.service.client.engine.llm
    assert llm.engine.cache.pool.available == llm.engine.cache.pool.total
    assert not llm.owner.requests
    assert server.service.client.ready


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def request(path: str, body: object = None, close: bool = True) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Connection: {'close' if close else 'keep-alive'}\r\n\r\n".encode() + data


def tiny(number: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": [5 + number % 7], "max_tokens": 1, "temperature": 0}


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_two_thousand_connections(crowded: Running) -> None:
    """All open at once and each in the middle of a request; then each is answered or told to come
    again, and another client is served meanwhile."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CONNECTIONS + 500:
        pytest.skip("too few file descriptors are allowed here")
    run.raise_file_limit()
    before, threads = descriptors(), threading.active_count()
    statuses: Counter[int] = Counter()
    texts: dict[int, set[str]] = {}

    async def finish(
        number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rest: bytes
    ) -> None:
        writer.write(rest)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        statuses[status] += 1
        if status == 200:
            text = json.loads(body)["choices"][0]["text"]
            texts.setdefault(number % 7, set()).add(text)
        writer.close()

    async def storm() -> None:
        open_ones = []
        for number in range(CONNECTIONS):
            reader, writer = await connect(crowded)
            whole = request("/v1/completions", tiny(number))
            writer.write(whole[:50])
            open_ones.append((number, reader, writer, whole[50:]))
        reader, writer = await connect(crowded)
        writer.write(request("/health/ready"))
        assert b" 200 " in await reader.readline()
        writer.close()
        await asyncio.gather(*(finish(*one) for one in open_ones))

    asyncio.run(storm())
    assert sum(statuses.values()) == CONNECTIONS
    assert set(statuses) <= {200, 429} and statuses[200] >= 64
    assert all(len(answers) == 1 for answers in texts.values())
    settled(crowded)
    wait_until(lambda: descriptors() <= before + 5)
    assert threading.active_count() <= threads + 40  # asyncio keeps those of its pool


def test_tiny_requests(crowded: Running) -> None:
    """One token each, over a few connections that are kept."""
    by_request: dict[int, set[str]] = {}

    async def client(numbers: range) -> None:
        reader, writer = await connect(crowded)
        for number in numbers:
            writer.write(request("/v1/completions", tiny(number), close=False))
            assert b" 200 " in await reader.readline()
            length = 0
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            answer = json.loads(await reader.readexactly(length))
            assert answer["usage"]["completion_tokens"] == 1
            by_request.setdefault(number % 7, set()).add(answer["choices"][0]["text"])
        writer.close()

    async def storm() -> None:
        await asyncio.gather(*(client(range(first, TINY, 8)) for first in range(8)))

    asyncio.run(storm())
    assert len(by_request) == 7 and all(len(texts) == 1 for texts in by_request.values())
    settled(crowded)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a setting of Linux")
def test_a_client_that_does_not_read(target: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off, its request cancelled, and others are not held up."""
    monkeypatch.setattr(run, "STALL_SECONDS", 1)
    service = service_of(target.with_draft(max_batch_size=8))
    listener = run.bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.listen()
    body = {"model": MODEL, "prompt": "Once", "n": 4, "max_tokens": 900, "ignore_eos": True}
    body |= {"stream": True, "logprobs": 20, "speculation": {"tokens": True}}
    for server in serve(service, listener=listener):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(listener.getsockname())
            client.sendall(request("/v1/completions", body))
            wait_until(lambda: not service.client.idle)
            wait_until(lambda: service.client.idle)
        cancelled = service.client.engine.loop.metrics.named["requests"].labels("cancelled")._value
        wait_until(lambda count=cancelled: count.get() == 4)
        settled(server)
