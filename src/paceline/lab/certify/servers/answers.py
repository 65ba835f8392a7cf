"""A server that answers requests, and what is read from its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import chain, repeat
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.errors import ConfigError

_MOST_SHOWN = 160  # characters of a server's error


class ServerRefusedError(Exception):
    """The server answered with an error of the request's (4xx): it may not know the feature."""


class FailedError(Exception):
    """The server did not answer, or with an error of its own (5xx), or not in the protocol."""


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

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. Raises ServerRefusedError and FailedError."""
        return self._read(self._open(path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]. Raises as ``answer`` does."""
        chunks: list[dict[str, Any]] = []
        with _failing():
            for line in self._open(path, {**body, "stream": True}):
                if not line.startswith(b"data:"):
                    continue
                event = line.decode("utf-8").removeprefix("data:").strip()
                if event == "[DONE]":
                    return chunks
                chunks.append(json.loads(event))
        raise FailedError("a stream ended without [DONE]")

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
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


# -- what an answer holds --------------------------------------------------------------------------


class AnswerToken(NamedTuple):
    """A token as the server spells it, with the logarithm of its chance (NaN where it is not
    given), and those of the likeliest tokens at the same position."""

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class AnswerChoice:
    """One choice of a completion; without ``tokens`` where the server gives no logprobs."""

    text: str
    reason: str | None
    tokens: tuple[AnswerToken, ...] = ()

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> AnswerChoice:
        """From OpenAI's layout of /v1/completions, or from that of chats, as llama.cpp has it."""
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            tokens = [
                (
                    record["token"],
                    record["logprob"],
                    {top["token"]: top["logprob"] for top in record.get("top_logprobs") or ()},
                )
                for record in logprobs["content"] or ()
            ]
        else:
            columns = (logprobs.get(name) or () for name in ("token_logprobs", "top_logprobs"))
            values, tops = (chain(column, repeat(None)) for column in columns)
            tokens = list(zip(logprobs.get("tokens") or (), values, tops, strict=False))
        return cls(
            str(choice.get("text") or ""),
            choice.get("finish_reason"),
            tuple(
                AnswerToken(token, math.nan if value is None else float(value), dict(top or {}))
                for token, value, top in tokens
            ),
        )

    @property
    def spelt(self) -> list[str]:
        return [token.text for token in self.tokens]


@dataclass(frozen=True)
class ServerCompletion:
    """The choices of an answer, and the tokens that the server counts, None if it does not."""

    choices: list[AnswerChoice]
    read: int | None
    written: int | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> ServerCompletion:
        """Raises FailedError on an answer without choices."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise FailedError("an answer has no choices")
        counts = (counted(answer, kind) for kind in ("prompt", "completion"))
        return cls([AnswerChoice.of(choice) for choice in choices], *counts)


def counted(answer: Mapping[str, Any], kind: str) -> int | None:
    """Tokens of the "prompt" or the "completion", as the server counts them."""
    count = (answer.get("usage") or {}).get(f"{kind}_tokens")
    return count if isinstance(count, int) else None
