"""``paceline serve`` as a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

START_SECONDS = 300  # a busy machine is slow to load torch; an idle one takes about six


@dataclass(frozen=True)
class Served:
    """A running server: its address, without a slash at the end, and the model's name."""

    root: str
    model: str

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


class ServedProcess:
    """A started server on ``port``; ``errors`` collects what it writes to stderr."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=start_new_session,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.errors: list[str] = []
        stderr = self.process.stderr
        self._reader = threading.Thread(target=lambda: self.errors.extend(stderr), daemon=True)
        self._reader.start()
        guard = threading.Timer(START_SECONDS, self.process.kill)
        guard.start()
        self.announcement = self.process.stdout.readline()
        guard.cancel()
        found = re.search(r"http://127\.0\.0\.1:(\d+) ", self.announcement)
        assert found, (self.announcement, self.errors)
        self.port = int(found[1])

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> HTTPResponse:
        """The response, its body still to be read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        return connection.getresponse()

    def wait_for_status(self, path: str, status: int, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while self.ask("GET", path).status != status:
            assert time.monotonic() < end, f"{path} never said {status}"
            time.sleep(0.02)

    def wait(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def __enter__(self) -> ServedProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
