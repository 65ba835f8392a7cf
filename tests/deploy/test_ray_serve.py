"""The Ray Serve application with two replicas of the embedded pair; run by `make test-routers`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

# A busy machine starts Ray's proxy in more than the five seconds that it is given. Read at import.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")

ray = pytest.importorskip("ray", reason="ray[serve] is not installed; see make test-routers")
serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
START_SECONDS = 180


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sys.path.insert(0, str(DEPLOY))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = os.pathsep.join(str(path) for path in (DEPLOY, *sys.path) if path)
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        from ray_serve import build

        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": "paceline/tiny", "draft": "paceline/tiny-draft", "min_replicas": "2"}
        serve.run(build(args), route_prefix="/", blocking=False)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def post(url: str, **fields: Any) -> Any:
    body = {"model": "paceline/tiny", "prompt": "Once upon a time", "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(asked, timeout=60)


def complete(url: str, **fields: Any) -> str:
    with post(url, **fields) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


def pieces(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        text = line.decode().strip()
        if text.startswith("data: {"):
            yield json.loads(text[6:])


def replicas() -> dict[int, int]:
    """Processes of replicas, and the processor time that each has had."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0]
            ticks = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if name.startswith(b"ray::ServeReplica") and os.stat(folder).st_uid == os.getuid():
            found[int(folder.name)] = int(ticks[11]) + int(ticks[12])
    return found


def test_streams_and_whole_answers(url: str) -> None:
    assert len(replicas()) == 2
    whole = complete(url, max_tokens=24)
    with post(url, max_tokens=24, stream=True) as answer:
        told = list(pieces(answer))
    assert "".join(p["choices"][0]["text"] for p in told if p["choices"]) == whole
    assert len(told) > 3  # as they come, not all at the end
    before, answers = replicas(), []
    threads = [
        threading.Thread(target=lambda: answers.append(complete(url, max_tokens=24)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [whole] * 8
    after = replicas()
    assert all(after[pid] > before[pid] for pid in before)  # both worked
    with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as answer:
        assert json.loads(answer.read())["data"][0]["id"] == "paceline/tiny"


def test_a_replica_killed_in_mid_stream(url: str) -> None:
    """Its client sees that the answer is not whole; the next requests succeed."""
    whole = complete(url, max_tokens=24)
    # Eight long answers without drafts, which take seconds.
    plainly = {"n": 8, "speculation": {"drafter": "none"}}
    answer = post(url, max_tokens=900, stream=True, ignore_eos=True, **plainly)
    told = pieces(answer)
    assert next(told)["choices"]
    before = after = replicas()
    while max(after[pid] - before[pid] for pid in before) < 5:  # ticks, of 10 ms
        next(told)
        after = replicas()
    busy = max(before, key=lambda pid: after[pid] - before[pid])
    os.kill(busy, signal.SIGKILL)
    # Ray's proxy ends the stream as if it were complete, but for its end: no finish reason, no
    # [DONE]. Nobody else is left to say it.
    rest: list[str] = []
    with contextlib.suppress(OSError, HTTPException):
        rest += (line.decode().strip() for line in answer)
    said = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert not any(c.get("finish_reason") for piece in said for c in piece.get("choices", ()))
    assert "data: [DONE]" not in rest
    end = time.monotonic() + START_SECONDS
    while True:  # Ray hears of it within a health check
        try:
            assert complete(url, max_tokens=24) == whole
            break
        except (OSError, HTTPException):
            assert time.monotonic() < end
            time.sleep(1)
    while len(replicas()) < 2 or busy in replicas():  # and starts another
        assert time.monotonic() < end
        time.sleep(1)
    assert complete(url, max_tokens=24) == whole
