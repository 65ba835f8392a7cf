"""Something that answers requests: a server behind a URL, and what is read from its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.errors import ConfigError

ServerBody = Mapping[str, Any]
_MOST_SHOWN = 160  # characters of a server's error


class ServerRefusedError(Exception):
    """The server answered with an error of the request's (4xx): it may not know the feature."""


class FailedError(Exception):
    """The server did not answer, or with an error of its own (5xx), or not in the protocol."""


class Answering(Protocol):
    """Answers requests. ``name`` is what people call it."""

    @property
    def name(self) -> str: ...

    def answer(self, path: str, body: ServerBody) -> dict[str, Any]:
        """The whole answer. Raises ServerRefusedError and FailedError."""
        ...

    def stream(self, path: str, body: ServerBody) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]. Raises as ``answer`` does."""
        ...


@dataclass(frozen=True)
class AnsweringServer:
    """A server at ``url`` (with or without /v1) asked for ``model``.

    ``extra`` goes into every body: that is how one server answers with and without speculation.
    """

    url: str
    model: str
    key: str | None = None
    timeout: float = 120.0
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        off = ", speculation off" if self.extra else ""
        return f"{self.model} at {self.url}{off}"

    @classmethod
    def connect(
        cls, url: str, model: str | None = None, key: str | None = None, timeout: float = 120.0
    ) -> tuple[AnsweringServer, AnsweringServer | None]:
        """The server at a URL, and the same without speculation where it can be switched off.

        Without ``model`` the first that it lists. Raises ConfigError if nobody answers there.
        """
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url} is no URL; give it as http://HOST:PORT")
        asking = cls(base, model or "", key, timeout)
        try:
            listed = asking._read(asking._open("models", None)).get("data") or []
        except (ServerRefusedError, FailedError) as error:
            raise ConfigError(f"no server answers at {base}/v1/models: {error}") from None
        ours = [item for item in listed if isinstance(item, dict) and model in (None, item["id"])]
        if model is None and not ours:
            raise ConfigError(f"the server at {base} lists no model; name one with --model")
        server = cls(base, model or str(ours[0]["id"]), key, timeout)
        if not any(item.get("owned_by") == "paceline" for item in ours):
            return server, None
        off = cls(base, server.model, key, timeout, (("speculation", {"method": "off"}),))
        return server, off

    def answer(self, path: str, body: ServerBody) -> dict[str, Any]:
        return self._read(self._open(path, body))

    def stream(self, path: str, body: ServerBody) -> list[dict[str, Any]]:
        chunks, ended = [], False
        with _failing():
            for line in self._open(path, {**body, "stream": True}):
                event = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if event == "[DONE]":
                    ended = True
                    break
                chunks.append(json.loads(event))
        if not ended:
            raise FailedError("a stream ended without [DONE]")
        return chunks

    def _open(self, path: str, body: ServerBody | None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data = json.dumps({"model": self.model, **body, **dict(self.extra)}).encode()
        request = Request(f"{self.url}/v1/{path}", data, headers)
        with _failing():
            response: HTTPResponse = urlopen(request, timeout=self.timeout)
            return response

    def _read(self, response: HTTPResponse) -> dict[str, Any]:
        with _failing(), response:
            answer = json.load(response)
        if not isinstance(answer, dict):
            raise FailedError("the answer is no JSON object")
        return answer


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except HTTPError as error:
        body = " ".join(error.read().decode("utf-8", errors="replace").split())[:_MOST_SHOWN]
        kind = ServerRefusedError if 400 <= error.code < 500 else FailedError
        raise kind(f"{error.code} {body}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise FailedError(f"{type(error).__name__}: {error}") from None


# -- what an answer says ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One choice of a completion. ``tokens`` spelt out, with the logarithms of their chances, and
    those of the likeliest at the same place; empty where the server gives none."""

    text: str
    reason: str | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[Mapping[str, float], ...] = ()

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> Said:
        """From OpenAI's layout of /v1/completions, or from that of chats, as llama.cpp has it."""
        logprobs = choice.get("logprobs") or {}
        text, reason = str(choice.get("text") or ""), choice.get("finish_reason")
        if "content" in logprobs:
            records = logprobs["content"] or ()
            tops = [
                {top["token"]: top["logprob"] for top in record.get("top_logprobs") or ()}
                for record in records
            ]
            names = tuple(record["token"] for record in records)
            return cls(
                text, reason, names, tuple(float(r["logprob"]) for r in records), tuple(tops)
            )
        return cls(
            text,
            reason,
            tuple(logprobs.get("tokens") or ()),
            tuple(
                float(value) for value in logprobs.get("token_logprobs") or () if value is not None
            ),
            tuple(dict(top or {}) for top in logprobs.get("top_logprobs") or ()),
        )

    @classmethod
    def joined(cls, parts: Sequence[Said]) -> Said:
        """The deltas of a stream as one text."""
        reasons = [part.reason for part in parts if part.reason is not None]
        return cls(
            "".join(part.text for part in parts),
            reasons[-1] if reasons else None,
            tuple(token for part in parts for token in part.tokens),
            tuple(value for part in parts for value in part.logprobs),
            tuple(top for part in parts for top in part.likeliest),
        )


def choices_of(answer: Mapping[str, Any]) -> list[Said]:
    """Raises FailedError on an answer without choices."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise FailedError("an answer has no choices")
    return [Said.of(choice) for choice in choices]


def tokens_of(answer: Mapping[str, Any], kind: str = "completion") -> int | None:
    """How many tokens the server counts; None if it does not say."""
    count = (answer.get("usage") or {}).get(f"{kind}_tokens")
    return count if isinstance(count, int) else None
