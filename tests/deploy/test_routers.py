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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from deploy_tools import needed
from served_process import ServedProcess

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


def test_a_replica_killed_in_mid_stream(fleet: Fleet) -> None:
    """Its client sees that the answer is not whole; the next request succeeds at once."""
    whole = fleet.complete(max_tokens=24)
    answer = fleet.post(max_tokens=900, stream=True, ignore_eos=True)
    first = next(pieces(answer))
    assert first["choices"]
    loads = [json.loads(r.ask("GET", "/load").read())["server_load"] for r in fleet.replicas]
    assert sorted(loads) == [0, 1]
    fleet.replicas[loads.index(1)].process.kill()
    told: list[dict[str, Any]] = []
    try:
        told = list(pieces(answer))
        broke = False
    except (OSError, HTTPException):
        broke = True
    ended = any(
        choice.get("finish_reason") for piece in told for choice in piece.get("choices", ())
    )
    assert not ended and (broke or "error" in told[-1]), told[-1:]
    for _ in range(6):
        assert fleet.complete(max_tokens=24) == whole


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_throughput_of_two_by_one(router: str, tmp_path: Path, capsys: Any) -> None:
    """Printed, not judged: on a machine of few cores the replicas share what one had alone."""
    rates = Counter[int]()
    for count in (1, 2):
        with started(router, count, tmp_path) as fleet:
            began = time.perf_counter()
            answers = together(16, lambda _, f=fleet: f.complete(max_tokens=48, ignore_eos=True))
            seconds = time.perf_counter() - began
            assert len({str(answer) for answer in answers}) == 1
            rates[count] = round(16 * 48 / seconds)
    with capsys.disabled():
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        print(
            f"\n{router}: {rates[2]} tokens/s with two replicas, {rates[1]} with one: "
            f"{rates[2] / rates[1]:.2f} ({threads} threads each, {os.cpu_count()} cores)"
        )
