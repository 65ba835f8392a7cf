"""A client of any server with OpenAI's protocol: completions with their logprobs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import chain, repeat
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.errors import ConfigError, PacelineError

_TIMEOUT = 120.0  # seconds without any data
_MOST_SHOWN = 160  # characters of a server's error


class ServerError(PacelineError):
    """The server did not answer, refused the request, or its answer is not in the protocol."""


class AnswerToken(NamedTuple):
    """A token as the server spells it, its logprob (NaN if not given), and the logprobs of the
    likeliest tokens at the same position; null among these is left out."""

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class ScoredText:
    """A completion. ``tokens`` is empty if the server gives no logprobs; ``prompt_tokens`` is None
    if it does not count them."""

    text: str
    tokens: tuple[AnswerToken, ...]
    prompt_tokens: int | None = None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> ScoredText:
        """Parse the first choice, with logprobs in the format of /v1/completions or of chats, which
        llama.cpp uses for both."""
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        logprobs = choice.get("logprobs") or {}
        keys = ("tokens", "token_logprobs", "top_logprobs")
        names, values, tops = (logprobs.get(key) or () for key in keys)
        if "content" in logprobs:
            rows = logprobs["content"] or ()
            names, values = ([row[key] for row in rows] for key in ("token", "logprob"))
            listed = (row.get("top_logprobs") or () for row in rows)
            tops = [{top["token"]: top["logprob"] for top in row} for row in listed]
        padded = (chain(column, repeat(None)) for column in (values, tops))
        tokens = (
            AnswerToken(
                str(token),
                math.nan if value is None else float(value),
                {str(name): float(v) for name, v in (top or {}).items() if v is not None},
            )
            for token, value, top in zip(names, *padded, strict=False)
        )
        count = usage.get("prompt_tokens")
        counted = count if isinstance(count, int) else None
        return cls(str(choice.get("text") or ""), tuple(tokens), counted)

    @property
    def token_texts(self) -> list[str]:
        return [token.text for token in self.tokens]


@dataclass(frozen=True)
class OpenAIClient:
    """A server at ``url``, which ends in the API version. ``fields`` are added to every request,
    the model's name among them."""

    url: str
    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, url: str, key: str | None = None) -> OpenAIClient:
        """A client for ``url``, to which /v1 is added if it has no version. Raises ConfigError."""
        if not re.match(r"https?://[^/:]+", url):
            raise ConfigError(f"{url} is no URL; give it as http://HOST:PORT")
        base = url.rstrip("/")
        return cls(base if re.search(r"/v\d+$", base) else f"{base}/v1", key)

    def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises ServerError."""
        listed = self._answer("models").get("data")
        listed = listed if isinstance(listed, list) else []
        return [model for model in listed if isinstance(model, dict) and "id" in model]

    def complete(self, **body: Any) -> ScoredText:
        """The completion of a prompt. Raises ServerError."""
        answer = self._answer("completions", json.dumps({**self.fields, **body}).encode())
        try:
            return ScoredText.of(answer)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{self.url}: no valid answer: {error!r}") from None

    def _answer(self, path: str, data: bytes | None = None) -> dict[str, Any]:
        """The JSON object that answers a POST of ``data``, or a GET without it."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            request = Request(f"{self.url}/{path}", data, headers)
            with urlopen(request, timeout=_TIMEOUT) as response:
                answer = json.load(response)
        except HTTPError as error:
            body = " ".join(error.read().decode("utf-8", errors="replace").split())
            raise ServerError(f"{self.url}: {error.code} {body[:_MOST_SHOWN]}") from None
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}: {getattr(error, 'reason', error)}") from None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}: the answer is no JSON object")
        return answer
