"""A client of any server with OpenAI's protocol: answers and streams as JSON, and their parser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from itertools import chain, repeat
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from paceline.errors import ConfigError

_MOST_SHOWN = 160  # characters of a server's error


class RequestRefusedError(Exception):
    """The server refused the request (4xx): it may not support a field."""


class ServerFailedError(Exception):
    """The server did not answer, failed (5xx), or its answer is not valid in the protocol."""


class ServerTimeoutError(ServerFailedError):
    """The server did not answer in time."""


@dataclass(frozen=True)
class OpenAIClient:
    """A server at ``url``, which ends in the API version. ``timeout``: seconds without any data.
    ``fields`` are added to every request, the model's name among them. All methods raise
    RequestRefusedError and ServerFailedError."""

    url: str
    key: str | None = None
    timeout: float = 120.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, url: str, key: str | None = None, timeout: float = 120.0) -> OpenAIClient:
        """A client for ``url``, to which /v1 is added if it has no version. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"{url} is no URL; give it as http://HOST:PORT")
        base = url.rstrip("/")
        versioned = re.search(r"/v\d+$", base)
        return cls(base if versioned else f"{base}/v1", key, timeout)

    def models(self) -> list[dict[str, Any]]:
        listed = self.answer("models", None).get("data")
        return [model for model in listed or () if isinstance(model, dict) and "id" in model]

    def answer(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer to a POST of ``body``, or to a GET without a body."""
        with _failing(), self._open(path, body) as response:
            answer = json.load(response)
        if not isinstance(answer, dict):
            raise ServerFailedError("the answer is no JSON object")
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]."""
        with _failing(), self._open(path, {**body, "stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise ServerFailedError(str(chunk["error"])[:_MOST_SHOWN])
                yield chunk
        raise ServerFailedError("a stream ended without [DONE]")

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps({**self.fields, **body}).encode()
        request = Request(f"{self.url}/{path}", data, headers)
        response: HTTPResponse = urlopen(request, timeout=self.timeout)
        return response


@contextmanager
def _failing() -> Iterator[None]:
    """Translate errors of connection and protocol into the exceptions of this module."""
    try:
        yield
    except HTTPError as error:
        body = " ".join(error.read().decode("utf-8", errors="replace").split())[:_MOST_SHOWN]
        kind = RequestRefusedError if 400 <= error.code < 500 else ServerFailedError
        raise kind(f"{error.code} {body}") from None
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ServerTimeoutError("no answer in time") from None
        raise ServerFailedError(str(getattr(error.reason, "strerror", error.reason))) from None
    except TimeoutError:
        raise ServerTimeoutError("no answer in time") from None
    except (OSError, HTTPException, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ServerFailedError(f"{type(error).__name__}: {error}") from None


class AnswerToken(NamedTuple):
    """A token as the server spells it, its logprob (NaN if not given), and the logprobs of the
    likeliest tokens at the same position."""

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class AnswerChoice:
    """One choice of a completion or of a chunk of a stream. ``tokens`` is empty if the
    server gives no logprobs. ``prompt_tokens`` and ``completion_tokens`` (of all
    choices): the usage counts, None if the server gives none."""

    text: str
    reason: str | None
    tokens: tuple[AnswerToken, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @classmethod
    def of(cls, choice: Mapping[str, Any], answer: Mapping[str, Any]) -> AnswerChoice:
        """Parse a choice in the format of /v1/completions, or chat's (llama.cpp's for both)."""
        logprobs, usage = choice.get("logprobs") or {}, answer.get("usage") or {}
        keys = ("tokens", "token_logprobs", "top_logprobs")
        names, values, tops = (logprobs.get(key) or () for key in keys)
        if "content" in logprobs:
            rows = logprobs["content"] or ()
            names, values = ([row[key] for row in rows] for key in ("token", "logprob"))
            listed = (row.get("top_logprobs") or () for row in rows)
            tops = [{top["token"]: top["logprob"] for top in row} for row in listed]
        padded = (chain(column, repeat(None)) for column in (values, tops))
        tokens = (
            AnswerToken(token, math.nan if value is None else float(value), dict(top or {}))
            for token, value, top in zip(names, *padded, strict=False)
        )
        counts = (usage.get(key) for key in ("prompt_tokens", "completion_tokens"))
        return cls(
            str(choice.get("text") or ""),
            choice.get("finish_reason"),
            tuple(tokens),
            *(count if isinstance(count, int) else None for count in counts),
        )

    @property
    def token_texts(self) -> list[str]:
        return [token.text for token in self.tokens]


@_failing()
def choices_of(answer: Mapping[str, Any], streamed: bool = False) -> list[AnswerChoice]:
    """The choices of a completion, or of a chunk of a stream, in which there may be only the usage.
    Raises ServerFailedError if a whole answer has none, or they are not valid in the protocol."""
    choices = answer.get("choices") or ([{}] if streamed else [])
    if not choices:
        raise ServerFailedError("an answer has no choices")
    return [AnswerChoice.of(choice, answer) for choice in choices]
