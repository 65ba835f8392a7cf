"""Two replicas of the embedded pair behind routers that others wrote; run by `make test-routers`.

The replicas are processes, each with the threads that OMP_NUM_THREADS says. Routers run in front
of them as their documentation says, on this machine alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from support.deploy_tools import needed
from support.served_process import ServedProcess

MODEL = "paceline/tiny"
REPLICA = [
    MODEL,
    "--draft",
    "paceline/tiny-draft",
    "--log-level",
    "warning",
    "--drain-seconds",
    "60",
]
START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Fleet:
    """A router's address and the replicas behind it."""

    url: str
    replicas: list[ServedProcess]

    def post(
        self, seconds: float = 60.0, headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        """The answer of a completion, still to be read."""
        body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, **fields}
        given = {"Content-Type": "application/json", **(headers or {})}
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), given
        )
        return urllib.request.urlopen(asked, timeout=seconds)

    def complete(self, **fields: Any) -> str:
        with self.post(**fields) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def served(self) -> list[int]:
        """Requests that each replica has finished."""
        counts = []
        for replica in self.replicas:
            text = replica.ask("GET", "/metrics").read().decode()
            lines = [
                line for line in text.splitlines() if line.startswith("paceline_requests_total{")
            ]
            counts.append(sum(int(float(line.rsplit(" ", 1)[1])) for line in lines))
        return counts

    def ready(self) -> bool:
        try:
            return bool(self.complete(max_tokens=1) is not None)
        except (OSError, HTTPException):
            return False


def vllm_router(urls: list[str], port: int, metrics: int) -> list[str]:
    return [
        *(
            needed("vllm-router"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--policy",
            "round_robin",
        ),
        *("--prometheus-port", str(metrics), "--health-check-endpoint", "/health/ready"),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
        *("--worker-startup-check-interval", "1", "--worker-urls", *urls),
    ]


def smg(urls: list[str], port: int, metrics: int) -> list[str]:
    return [
        *(needed("smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "round_robin", "--prometheus-port", str(metrics)),
        *("--health-check-endpoint", "/health/ready", "--health-check-interval-secs", "1"),
        *("--health-failure-threshold", "1", "--worker-startup-check-interval", "1"),
        *("--worker-urls", *urls),
    ]


ROUTERS = {"vllm-router": vllm_router, "smg": smg}


@contextmanager
def started(router: str, count: int, folder: Path) -> Iterator[Fleet]:
    """So many replicas behind a router, once it passes requests on."""
    port, metrics = free_port(), free_port()
    with ExitStack() as stack:
        ROUTERS[router]([], port, metrics)  # skipped here, if at all
        replicas = together(count, lambda _: ServedProcess(REPLICA))
        for replica in replicas:
            assert isinstance(replica, ServedProcess), replica
            stack.enter_context(replica)
        urls = [f"http://127.0.0.1:{replica.port}" for replica in replicas]
        log = stack.enter_context((folder / f"{router}.log").open("w"))
        command = ROUTERS[router](urls, port, metrics)
        environment = {**os.environ, "PYTHONPATH": ""}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        stack.callback(process.wait, 20)
        stack.callback(process.kill)
        fleet = Fleet(f"http://127.0.0.1:{port}", replicas)
        end = time.monotonic() + START_SECONDS
        while not fleet.ready():
            assert process.poll() is None and time.monotonic() < end, Path(log.name).read_text()
            time.sleep(0.2)
        yield fleet


@pytest.fixture(params=sorted(ROUTERS))
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    with started(request.param, 2, tmp_path) as found:
        yield found


def together(count: int, do: Any) -> list[Any]:
    """Results of ``do(0)``, ``do(1)``, ... at the same time; exceptions are results."""
    results: list[Any] = [None] * count

    def run(place: int) -> None:
        try:
            results[place] = do(place)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def pieces(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        text = line.decode().strip()
        if text.startswith("data: {"):
            yield json.loads(text[6:])


def test_streams_death_and_draining(fleet: Fleet) -> None:
    """One start of a fleet, as it takes long: first what is whole, then what ends."""
    # Streams and whole answers say the same; requests go to both, whatever router fields they have.
    whole = fleet.complete(max_tokens=24)
    session = {"session_id": "a", "session_params": {"session_id": "a"}, "user": "u"}
    with fleet.post(max_tokens=24, stream=True, headers={"x-session-id": "a"}, **session) as answer:
        assert "".join(p["choices"][0]["text"] for p in pieces(answer) if p["choices"]) == whole
    before = fleet.served()
    answers = together(8, lambda _: fleet.complete(max_tokens=24))
    assert answers == [whole] * 8
    assert all(now > then for now, then in zip(fleet.served(), before, strict=True))
    _drain(fleet, whole)


def _drain(fleet: Fleet, whole: str) -> None:
    """SIGTERM to a replica while requests come and run: none of them is lost."""
    leaving = fleet.replicas[0]
    gone = threading.Event()

    def ask(place: int) -> list[str]:
        found = []
        while not gone.is_set() or len(found) < 2:
            found.append(fleet.complete(max_tokens=24))
            if place == 0 and len(found) == 2:
                leaving.process.send_signal(signal.SIGTERM)
            if leaving.process.poll() is not None:
                gone.set()
        return found

    results = together(4, ask)
    assert all(isinstance(found, list) for found in results), results
    assert {text for found in results for text in found} == {whole}
    assert leaving.wait() == 0
    assert fleet.complete(max_tokens=24) == whole


def _broken(fleet: Fleet, kill: Callable[[ServedProcess], None]) -> tuple[list[str], bool]:
    """What a client still reads once its replica is killed, and whether that then breaks off."""
    answer = fleet.post(max_tokens=900, stream=True, ignore_eos=True)
    assert next(pieces(answer))["choices"]
    alive = [replica for replica in fleet.replicas if replica.process.poll() is None]
    loads = [json.loads(one.ask("GET", "/load").read())["server_load"] for one in alive]
    assert sorted(loads) == [0] * (len(alive) - 1) + [1]
    kill(alive[loads.index(1)])
    told: list[str] = []
    try:
        told += (line.decode().strip() for line in answer)
    except (OSError, HTTPException):
        return told, True
    return told, False


def _kill_engine(replica: ServedProcess) -> None:
    """As the system does that runs out of memory: the larger of the two processes."""
    (engine,) = (
        Path(f"/proc/{replica.process.pid}/task/{replica.process.pid}/children").read_text().split()
    )
    os.kill(int(engine), signal.SIGKILL)


def _gone(fleet: Fleet) -> None:
    """A server that has lost its engine ends by itself, with 1."""
    end = time.monotonic() + START_SECONDS
    while not any(replica.process.poll() == 1 for replica in fleet.replicas):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_replica_killed_in_mid_stream(router: str, tmp_path: Path) -> None:
    """Its client sees that the answer is not whole; the next requests succeed at once."""
    with started(router, 3, tmp_path) as fleet:
        whole = fleet.complete(max_tokens=24)
        told, _ = _broken(fleet, _kill_engine)
        said = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
        assert said[-1]["error"]["code"] == "engine_lost" and "data: [DONE]" not in told
        assert [fleet.complete(max_tokens=24) for _ in range(6)] == [whole] * 6
        _gone(fleet)
        # Killed whole it says nothing. smg does, and then [DONE]; vllm-router ends the stream as
        # if it were complete, but for its end: no finish reason, no [DONE].
        told, broke = _broken(fleet, lambda replica: replica.process.kill())
        said = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
        ended = any(c.get("finish_reason") for piece in said for c in piece.get("choices", ()))
        named = broke or any("error" in piece for piece in said)
        assert not ended
        assert named or (router == "vllm-router" and "data: [DONE]" not in told)
        assert [fleet.complete(max_tokens=24) for _ in range(6)] == [whole] * 6


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_throughput_of_two_by_one(router: str, tmp_path: Path, capsys: Any) -> None:
    """Printed, not judged: on a machine of few cores the replicas share what one had alone."""
    rates, tokens = Counter[int](), 400
    for count in (1, 2):
        with started(router, count, tmp_path) as fleet:
            began = time.perf_counter()
            answers = together(
                16, lambda _, f=fleet: f.complete(max_tokens=tokens, ignore_eos=True)
            )
            seconds = time.perf_counter() - began
            assert len({str(answer) for answer in answers}) == 1
            rates[count] = round(16 * tokens / seconds)
    with capsys.disabled():
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        print(
            f"\n{router}: {rates[2]} tokens/s with two replicas, {rates[1]} with one: "
            f"{rates[2] / rates[1]:.2f} ({threads} threads each, {os.cpu_count()} cores)"
        )
