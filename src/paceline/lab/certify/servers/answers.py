"""A server that answers requests, and what is read from its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.lab.openai_client import OpenAIClient, RequestRefusedError, ServerFailedError


@dataclass(frozen=True)
class AnsweringServer:
    """A server asked for ``model``.

    ``extra`` goes into every body: that is how one server answers with and without speculation.
    """

    client: OpenAIClient
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        off = ", speculation off" if self.extra else ""
        return f"{self.model} at {self.client.url.removesuffix('/v1')}{off}"

    @classmethod
    def connect(
        cls, url: str, model: str | None = None, key: str | None = None, timeout: float = 120.0
    ) -> tuple[AnsweringServer, AnsweringServer | None]:
        """The server at a URL, and the same without speculation where it can be switched off.

        Without ``model`` the first that it lists. Raises ConfigError if nobody answers there.
        """
        client = OpenAIClient.at(url, key, timeout)
        try:
            listed = client.models()
        except (RequestRefusedError, ServerFailedError) as error:
            raise ConfigError(f"no server answers at {client.url}/models: {error}") from None
        matching = [item for item in listed if model in (None, item["id"])]
        if model is None and not matching:
            raise ConfigError(f"the server at {url} lists no model; name one with --model")
        server = cls(client, model or str(matching[0]["id"]))
        if not any(item.get("owned_by") == "paceline" for item in matching):
            return server, None
        return server, replace(server, extra={"speculation": {"method": "off"}})

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. Raises RequestRefusedError and ServerFailedError, as ``stream``."""
        return self.client.answer(path, {"model": self.model, **body, **self.extra})

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream."""
        return list(self.client.stream(path, {"model": self.model, **body, **self.extra}))


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
        """Raises ServerFailedError on an answer without choices."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise ServerFailedError("an answer has no choices")
        counts = (counted(answer, kind) for kind in ("prompt", "completion"))
        return cls([AnswerChoice.of(choice) for choice in choices], *counts)


def counted(answer: Mapping[str, Any], kind: str) -> int | None:
    """Tokens of the "prompt" or the "completion", as the server counts them."""
    count = (answer.get("usage") or {}).get(f"{kind}_tokens")
    return count if isinstance(count, int) else None
