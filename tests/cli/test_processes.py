"""The two processes of ``paceline serve``, and what becomes of one without the other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.served_process import ServedProcess

MODEL = "paceline/tiny"
ARGUMENTS = ("--draft", "none", "--threads", "1", "--dtype", "float32")

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc"),
    pytest.mark.slow,  # nine servers are started
]


@pytest.fixture
def server() -> Iterator[ServedProcess]:
    with ServedProcess(ARGUMENTS) as process:
        yield process


@pytest.fixture(scope="module")
def shared() -> Iterator[ServedProcess]:
    """Several tests, one start; the last of them ends it."""
    with ServedProcess(ARGUMENTS) as process:
        yield process


def children(pid: int) -> list[int]:
    """Processes that have this parent, zombies too."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid:
            children.append(int(stat.parent.name))
    return children


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    """Ended; a zombie is, too, while whoever adopted it has not reaped it."""
    try:
        return state(Path(f"/proc/{pid}/stat")) == "Z"
    except OSError:
        return True


def stopped(pid: int) -> bool:
    """All threads; the signal reaches them one after another."""
    return all(state(stat) == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def completion(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, **fields}


LONG = {"max_tokens": 900, "ignore_eos": True}


def test_only_one_of_them_has_torch(shared: ServedProcess) -> None:
    (engine,) = children(shared.process.pid)
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (shared.process.pid, engine)}
    assert "libtorch" in maps[engine]
    assert "libtorch" not in maps[shared.process.pid]
    # The engine's process holds neither the port nor any connection of a client.
    body = completion(max_tokens=40, stream=True)
    response = shared.ask("POST", "/v1/completions", body)
    links = [os.readlink(descriptor) for descriptor in Path(f"/proc/{engine}/fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 1
    assert b"data: [DONE]" in response.read()


def test_an_engine_that_says_nothing(shared: ServedProcess) -> None:
    """Stopped, as under a debugger: clients have their deadlines, and the metrics say 503."""
    (engine,) = children(shared.process.pid)
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: stopped(engine))
        late = shared.ask("POST", "/v1/completions", completion(deadline=0.1, **LONG))
        assert late.status == 408
        metrics = shared.ask("GET", "/metrics")
        assert metrics.status == 503
        assert json.loads(metrics.read())["error"]["code"] == "engine_slow"
        assert shared.ask("GET", "/version").status == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    assert shared.ask("POST", "/v1/completions", completion(max_tokens=3)).status == 200


class Clients:
    """Streams and whole answers that are under way."""

    def __init__(self, server: ServedProcess, max_tokens: int = 900) -> None:
        self.server = server
        self.body = completion(max_tokens=max_tokens, ignore_eos=True)
        self.stream = server.ask("POST", "/v1/completions", {**self.body, "stream": True})
        assert self.stream.readline().startswith(b"data: {")
        self.answers: list[Any] = []
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()
        wait_until(lambda: self._running() >= 2)

    def _ask(self) -> None:
        try:
            response = self.server.ask("POST", "/v1/completions", self.body)
            self.answers.append((response.status, json.loads(response.read())))
        except (OSError, ValueError) as error:
            self.answers.append(error)

    def _running(self) -> float:
        text = self.server.ask("GET", "/metrics").read().decode()
        lines = [x for x in text.splitlines() if x.startswith("paceline_requests_running ")]
        return float(lines[0].split()[1])


def test_sigterm_under_load(shared: ServedProcess) -> None:
    """To both, as a supervisor may send it: what runs is finished, and nothing is left."""
    (engine,) = children(shared.process.pid)
    clients = Clients(shared, max_tokens=300)
    for pid in (engine, shared.process.pid):
        os.kill(pid, signal.SIGTERM)
    lines = [line for line in clients.stream.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    clients.thread.join(60)
    status, body = clients.answers[0]
    assert status == 200 and body["usage"]["completion_tokens"] == 300
    assert shared.wait() == 0
    wait_until(lambda: gone(engine))


def test_the_engine_is_killed(server: ServedProcess) -> None:
    """Whoever waits is told, and the server ends by itself with one line; the next one, as all
    others here, starts without anything to repair."""
    (engine,) = children(server.process.pid)
    clients = Clients(server)
    os.kill(engine, signal.SIGKILL)
    lines = [line for line in clients.stream.read().decode().splitlines() if line]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_lost"
    clients.thread.join(20)
    status, body = clients.answers[0]
    assert status == 503 and body["error"]["code"] == "engine_lost"
    assert server.wait(20) == 1
    wait_until(lambda: gone(engine))
    said = [line for line in server.errors if line.startswith("error: ")]
    assert len(said) == 1 and "its process was killed by SIGKILL" in said[0]
    assert "Traceback" not in "".join(server.errors)


def test_the_http_process_is_killed(server: ServedProcess) -> None:
    (engine,) = children(server.process.pid)
    clients = Clients(server)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: gone(engine))
    clients.thread.join(20)
    assert not clients.thread.is_alive()


def test_ctrl_c_in_a_terminal() -> None:
    """SIGINT for the whole process group, twice: at once, and without tracebacks."""
    with ServedProcess(ARGUMENTS, start_new_session=True) as server:
        (engine,) = children(server.process.pid)
        stream = server.ask("POST", "/v1/completions", completion(stream=True, **LONG))
        assert stream.readline().startswith(b"data: {")
        os.killpg(server.process.pid, signal.SIGINT)
        server.wait_for_status("/health/ready", 503)
        assert not gone(engine)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait(20) == 130
        wait_until(lambda: gone(engine))
        assert "Traceback" not in "".join(server.errors)


def starting(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("victim", ["engine", "http", "ctrl-c"])
def test_an_end_while_loading(victim: str) -> None:
    with starting(*ARGUMENTS) as process:
        try:
            wait_until(lambda: children(process.pid), 60)
            (engine,) = children(process.pid)
            if victim == "engine":
                os.kill(engine, signal.SIGKILL)
            elif victim == "http":
                process.kill()
            else:
                wait_until(lambda: "libtorch" in Path(f"/proc/{engine}/maps").read_text(), 60)
                os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            wait_until(lambda: gone(engine))
        finally:
            process.kill()
    # Python itself makes an interrupt that passes through the making of a dataclass, as imports do,
    # a death by SIGINT, whoever catches it; a shell says 130 then, too.
    expected = {"engine": {1}, "http": {-signal.SIGKILL}, "ctrl-c": {130, -signal.SIGINT}}
    assert process.returncode in expected[victim]
    assert "Traceback" not in errors
    if victim == "engine":
        *stages, line = errors.splitlines()
        assert all(stage.startswith(("starting", "loading")) for stage in stages)
        assert line.startswith("error: the engine process was killed by SIGKILL while it was load")


def test_connections_beyond_the_files_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get 503."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 120\nexec "{sys.executable}" "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(limited))
    with ServedProcess(ARGUMENTS) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(56)]
        assert server.ask("GET", "/health").status == 503
        for connection in silent:
            connection.close()
        server.wait_for_status("/health", 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
