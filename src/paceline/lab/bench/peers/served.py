"""A peer behind HTTP: clients that each send their next request when one is answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline.lab.bench.outcome import Ask, Contestant, TimedAnswer, TimedRun
from paceline.lab.bench.peers.children import PeerProcess
from paceline.lab.bench.peers.kinds import (
    OwnSide,
    PeerDifferences,
    PeerFailedError,
    known,
    shares,
)

PeerBody = Mapping[str, Any]
_TIMEOUT = 600.0  # seconds between two deliveries: a long prompt on a slow machine
_SHOWN = 160  # characters of a server's error


@dataclass(frozen=True)
class Address:
    """Where a server is; ``base`` is in front of every path."""

    secure: bool
    host: str
    port: int | None
    base: str = ""

    @classmethod
    def of(cls, url: str) -> Address:
        """With or without /v1. Raises PeerFailedError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise PeerFailedError(f"{url} is no URL; give it as http://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PeerFailedError(f"{url} is no URL; give it as http://HOST:PORT")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme == "https", parts.hostname, port, base)

    def ask(self, path: str, body: PeerBody | None, timeout: float = _TIMEOUT) -> Any:
        """An open response. Raises OSError, HTTPException, and PeerRefusedError for a status."""
        kind = HTTPSConnection if self.secure else HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout)
        data = None if body is None else json.dumps(body)
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, self.base + path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            said = " ".join(response.read().decode("utf-8", "replace").split())[:_SHOWN]
            raise PeerRefusedError(response.status, said)
        return response

    def read(self, path: str, timeout: float = 10.0) -> Any:
        with self.ask(path, None, timeout) as response:
            return json.load(response)


class PeerRefusedError(Exception):
    """The server answered with a status of its own."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


_FAILURES = (OSError, HTTPException, PeerRefusedError, ValueError, LookupError, TypeError)


@dataclass(frozen=True)
class Delivery:
    """What one event of a stream brought. ``ids`` where the server tells them; ``written`` and
    ``read`` are its own counts of the answer's and the prompt's tokens, at the end."""

    text: str = ""
    ids: tuple[int, ...] = ()
    written: int | None = None
    read: int | None = None


class Dialect(Protocol):
    """How a server is asked, and what its events say."""

    path: str

    def body(self, ask: Ask) -> dict[str, Any]: ...

    def delivery(self, event: Any) -> Delivery: ...


@dataclass
class ServedPeer(Contestant):
    """A server as a contestant. ``name`` is the method's; its texts are compared by ids, those of
    the target's tokenizer where the server tells none."""

    name: str
    address: Address
    dialect: Dialect
    clients: int
    own: OwnSide
    differences: PeerDifferences = field(default_factory=PeerDifferences)
    process: PeerProcess | None = None  # where the server was started here

    def close(self) -> None:
        if self.process is not None:
            self.process.close()

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PeerFailedError."""
        start = time.perf_counter()
        with ThreadPoolExecutor(self.clients) as pool:
            raw = list(pool.map(self._deliveries, asks))
        seconds = time.perf_counter() - start
        answers = [self._answer(ask, found) for ask, found in zip(asks, raw, strict=True)]
        return TimedRun.told(answers, seconds)

    def _deliveries(self, ask: Ask) -> list[tuple[float, Delivery]]:
        start = time.perf_counter()
        try:
            with self.address.ask(self.dialect.path, self.dialect.body(ask)) as response:
                return [
                    (time.perf_counter() - start, self.dialect.delivery(event))
                    for event in events(response)
                ]
        except _FAILURES as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise PeerFailedError(f"{self.name} did not answer ({what}); look at its log") from None

    def _answer(self, ask: Ask, found: Sequence[tuple[float, Delivery]]) -> TimedAnswer:
        parts = [(moment, one) for moment, one in found if one.text or one.ids]
        text = "".join(one.text for _, one in parts)
        ids = [token for _, one in parts for token in one.ids]
        tokens = known(self.name, ids or self._encoded(text), self.own)
        said = [one.written for _, one in found if one.written is not None]
        count = len(ids) or (said[-1] if said else len(tokens))
        if not parts or not count:
            raise PeerFailedError(f"{self.name} answered without a token; look at its log")
        weights = [len(one.ids) if ids else 1 for _, one in parts]
        if not ids and count != len(parts):
            weights = [max(1, len(self._encoded(one.text))) for _, one in parts]
        counts = shares(count, weights)
        arrivals = tuple((at, n) for (at, _), n in zip(parts, counts, strict=True) if n)
        answer = TimedAnswer(tokens, arrivals, count)
        read = [one.read for _, one in found if one.read is not None]
        self.differences.saw(ask, answer, read[-1] if read else None)
        return answer

    def _encoded(self, text: str) -> list[int]:
        found = self.own.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in found]


def events(response: Any) -> Iterator[Any]:
    """What the lines of a stream of server-sent events hold, until it ends or says so."""
    for line in response:
        said = line.decode("utf-8").strip()
        if not said.startswith("data:"):
            continue
        said = said.removeprefix("data:").strip()
        if said == "[DONE]":
            return
        event = json.loads(said)
        if "error" in event:
            raise ValueError(str(event["error"])[:_SHOWN])
        yield event
