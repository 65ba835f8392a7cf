"""The life of a server: where it listens, how it says so, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from unittest.mock import AsyncMock

import pytest
import uvicorn

from paceline import LLM
from paceline.server import run
from paceline.server.app import create_app
from paceline.server.config import ServeConfig
from paceline.server.requestlog import RequestLog
from paceline.server.security import Keys
from paceline.server.service import Service
from paceline.server.wire import Facts
from support.running_server import service_of

MODEL = "paceline/tiny"


# -- the address -----------------------------------------------------------------------------------


def test_a_free_port_is_found_and_told() -> None:
    with run.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert run.url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert run.url_of(listener, "::1") == f"http://[::1]:{port}"


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = f"cannot listen on 127.0.0.1, port {port}: Address already in use; choose another"
        with pytest.raises(run.AddressError, match=message):
            run.bind("127.0.0.1", port)


def test_a_port_that_was_just_left_is_free() -> None:
    """A restart must not wait for the connections that its predecessor closed."""
    with run.bind("127.0.0.1", 0) as first:
        first.listen()
        address = first.getsockname()
        client = socket.create_connection(address)
        served, _ = first.accept()
        served.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    run.bind(*address).close()


def test_addresses_that_cannot_be() -> None:
    with pytest.raises(run.AddressError, match="cannot listen on no such host, port 0: "):
        run.bind("no such host", 0)
    with pytest.raises(run.AddressError, match=r"cannot listen on 192\.0\.2\.1, .*another --host"):
        run.bind("192.0.2.1", 0)


def test_somebody_was_quicker(target: LLM) -> None:
    """Two may bind while neither listens; the slower one says so in a line."""
    with run.bind("127.0.0.1", 0) as ours, socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        theirs.bind(ours.getsockname())
        theirs.listen()
        service = service_of(target.with_draft(), port=ours.getsockname()[1])
        with pytest.raises(run.AddressError, match="already in use"):
            run.run(service, Keys(), ours)


def test_the_line_of_the_start(target: LLM) -> None:
    llm = target.with_draft(["ngram", "suffix"], draft_length=2)
    config = ServeConfig(served_model_name="mine")
    said = run.describe(Facts.of(llm), config, Keys(), "http://127.0.0.1:1")
    assert said == (
        "serving mine at http://127.0.0.1:1 (drafters: ngram, suffix; float32 on cpu; "
        f"backend {llm.target.backend_reason}; no API key)"
    )
    assert "drafters: none; " in run.describe(Facts.of(target), config, Keys(), "")
    assert "2 API keys" in run.describe(Facts.of(target), config, Keys.of(["a", "b"]), "")


# -- the end ---------------------------------------------------------------------------------------


@dataclass
class Ending:
    """A draining server on a thread; signals are handed to it as the system would."""

    server: run.DrainingServer
    service: Service
    thread: threading.Thread
    port: int

    def stream(self) -> HTTPResponse:
        """A long answer that has begun."""
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "stream": True}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        return response


def ending(target: LLM, drain_seconds: float) -> Iterator[Ending]:
    service = service_of(target.with_draft(max_batch_size=2))
    listener = run.bind("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    config = uvicorn.Config(create_app(service), log_config=None, lifespan="on")
    server = run.DrainingServer(config, service.client, drain_seconds, "started")
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    yield Ending(server, service, thread, port)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def impatient(target: LLM) -> Iterator[Ending]:
    yield from ending(target, 0.0)


@pytest.fixture
def patient(target: LLM) -> Iterator[Ending]:
    yield from ending(target, 600.0)


def test_idle_servers_end_at_once(patient: Ending) -> None:
    patient.server.handle_exit(signal.SIGINT, None)
    patient.thread.join(20)
    assert not patient.thread.is_alive() and not patient.service.client.alive


def test_what_still_runs_after_drain_seconds_is_told(impatient: Ending) -> None:
    response = impatient.stream()
    impatient.server.handle_exit(signal.SIGTERM, None)
    lines = [line for line in response.read().decode().splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    impatient.thread.join(20)
    assert not impatient.thread.is_alive() and not impatient.service.client.alive


def test_clients_that_neither_send_nor_read_are_ended_without_a_traceback(
    impatient: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.server")
    impatient.server.config.timeout_graceful_shutdown = 0
    with socket.create_connection(("127.0.0.1", impatient.port)) as client:
        kind = "Content-Type: application/json\r\nContent-Length: 100"
        client.sendall(f"POST /v1/messages HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n{{".encode())
        while not impatient.server.server_state.tasks:
            time.sleep(0.01)
        impatient.server.handle_exit(signal.SIGTERM, None)
        assert client.makefile().readline().startswith("HTTP/1.1 503 ")
        impatient.thread.join(20)

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await asyncio.sleep(60)

    async def cancelled() -> None:
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        task = asyncio.create_task(RequestLog(hangs)(scope, AsyncMock(), AsyncMock()))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(cancelled())
    logged = [record for record in caplog.records if record.name == "paceline.server"]
    assert [r.getMessage().split()[:3] for r in logged if " 503 " in r.getMessage()] == [
        ["POST", "/v1/messages", "503"],
        ["GET", "/x", "503"],
    ]
    assert not any(record.exc_info for record in caplog.records)


def test_a_second_signal_ends_the_process(patient: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    response = patient.stream()
    patient.server.handle_exit(signal.SIGTERM, None)
    assert not codes and not patient.service.client.ready
    patient.server.handle_exit(signal.SIGINT, None)
    assert codes == [130]
    response.close()
