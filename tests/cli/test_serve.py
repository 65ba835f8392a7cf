"""``paceline serve``: a real process, its flags and file, and the shipped examples."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

from served_process import ServedProcess

PROMPT = "Once upon a time"
MODEL = "paceline/tiny"


def completion(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields}


def test_a_server_answers_and_drains(tmp_path: Path) -> None:
    """Answers; on SIGTERM it is unready first, finishes what runs, and exits with 0."""
    config = tmp_path / "server.toml"
    config.write_text(
        '[model]\ndraft = "ngram"\ndraft_length = 3\n[engine]\nthreads = 1\nmax_batch_size = 2\n'
        '[server]\nport = 1\nlog_level = "error"\n'
    )
    arguments = ["--config", str(config), "--log-level", "info"]  # flags win, as --port does
    with ServedProcess(arguments) as server:
        assert server.announcement.startswith(f"serving {MODEL} at http://127.0.0.1:")
        assert "ngram" in server.announcement and " on cpu" in server.announcement
        short = server.ask("POST", "/v1/completions", completion(max_tokens=5))
        assert short.status == 200
        assert json.loads(short.read())["usage"]["completion_tokens"] == 5
        body = completion(max_tokens=900, ignore_eos=True, stream=True)
        stream = server.ask("POST", "/v1/completions", body)
        assert stream.readline().startswith(b"data: {")

        server.process.send_signal(signal.SIGTERM)
        server.wait_for_status("/health/ready", 503)
        assert server.ask("GET", "/health").status == 200  # alive all the same
        refused = server.ask("POST", "/v1/completions", completion())
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "shutting_down"
        assert refused.headers["Retry-After"] == "5" and refused.headers["Connection"] == "close"

        lines = [line for line in stream.read().decode().splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        log = "".join(server.errors)
        assert "POST /v1/completions 200" in log and " 5 tokens\n" in log
        assert "900 tokens\n" in log and "SIGTERM: no new requests" in log
        assert PROMPT not in log and "Traceback" not in log
