"""Asking a server: who is asked, what is read from its answers, and how two of them compare."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

from paceline.errors import ConfigError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import DistributionTest
from paceline.lab.certify.chisquare import goodness
from paceline.lab.certify.decoding import first_difference
from paceline.lab.certify.effort import LONGEST, Effort
from paceline.lab.openai_client import OpenAIClient, RequestRefusedError, ServerFailedError

# Nats. Two logits of a bf16 model may each be off by a rounding step, which is 0.125 from 16 on.
TIE = 0.3
TOP = 5  # likeliest tokens asked for at each position; what /v1/completions gives everywhere
# What is asked for, until a server takes it. Some have a penalty of their model's own.
_LOGPROBS: tuple[dict[str, float], ...] = (
    {"logprobs": TOP, "repetition_penalty": 1.0},
    {"logprobs": TOP},
    {},
)
BINS = 10


def connect(
    url: str, model: str | None = None, key: str | None = None, timeout: float = 120.0
) -> tuple[OpenAIClient, OpenAIClient | None]:
    """The server at a URL, and the same without speculation where it can be switched off. Without
    ``model`` the first that it lists. Raises ConfigError if nobody answers there."""
    client = OpenAIClient.at(url, key, timeout)
    try:
        listed = client.models()
    except (RequestRefusedError, ServerFailedError) as error:
        raise ConfigError(
            f"no server answers at {client.url}/models: {error}; start it, or give another --url"
        ) from None
    matching = [item for item in listed if model in (None, item["id"])]
    strict = any(item.get("owned_by") in ("paceline", "vllm") for item in listed)
    if not matching and (model is None or strict):  # others may answer under any name
        names = ", ".join(str(item["id"]) for item in listed) or "no model"
        asked = "" if model is None else f"not {model}, but "
        raise ConfigError(f"the server at {url} lists {asked}{names}; name one with --model")
    fields: dict[str, Any] = {"model": model or str(matching[0]["id"])}
    server = replace(client, fields=fields)
    if not any(item.get("owned_by") == "paceline" for item in matching):
        return server, None
    return server, replace(client, fields={**fields, "speculation": {"drafter": "none"}})


def name_of(server: OpenAIClient) -> str:
    off = ", speculation off" if "speculation" in server.fields else ""
    return f"{server.fields['model']} at {server.url.removesuffix('/v1')}{off}"


class AnswerToken(NamedTuple):
    """A token as the server spells it, with the logarithm of its chance (NaN where it is not
    given), and those of the likeliest tokens at the same position."""

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class AnswerChoice:
    """One choice of a completion; without ``tokens`` where the server gives no logprobs. ``read``
    and ``written``: tokens of the prompt and of all choices, None if it does not count."""

    text: str
    reason: str | None
    tokens: tuple[AnswerToken, ...] = ()
    read: int | None = None
    written: int | None = None

    @classmethod
    def of(cls, choice: Mapping[str, Any]) -> AnswerChoice:
        """From OpenAI's layout of /v1/completions, or from that of chats, as llama.cpp has it."""
        logprobs = choice.get("logprobs") or {}
        keys = ("tokens", "token_logprobs", "top_logprobs")
        names, values, tops = (logprobs.get(key) or () for key in keys)
        if "content" in logprobs:
            rows = logprobs["content"] or ()
            names, values = ([row[key] for row in rows] for key in ("token", "logprob"))
            listed = (row.get("top_logprobs") or () for row in rows)
            tops = [{top["token"]: top["logprob"] for top in some} for some in listed]
        filled = (chain(column, repeat(None)) for column in (values, tops))
        tokens = (
            AnswerToken(token, math.nan if value is None else float(value), dict(top or {}))
            for token, value, top in zip(names, *filled, strict=False)
        )
        return cls(str(choice.get("text") or ""), choice.get("finish_reason"), tuple(tokens))

    @property
    def spelt(self) -> list[str]:
        return [token.text for token in self.tokens]


def choices_of(answer: Mapping[str, Any]) -> list[AnswerChoice]:
    """Raises ServerFailedError on an answer without choices."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ServerFailedError("an answer has no choices")
    read, written = (counted(answer, kind) for kind in ("prompt", "completion"))
    return [replace(AnswerChoice.of(choice), read=read, written=written) for choice in choices]


def counted(answer: Mapping[str, Any], kind: str) -> int | None:
    """Tokens of the "prompt" or the "completion", as the server counts them."""
    count = (answer.get("usage") or {}).get(f"{kind}_tokens")
    return count if isinstance(count, int) else None


class EffortSpentError(Exception):
    """As many requests were sent as may be, or the time is over."""


class Asking:
    """Asks a ``server``, and a ``reference`` if there is one. ``prompts``: (name, text). ``bins``:
    tokens of its samples, by their position in the distribution that it names."""

    def __init__(
        self,
        server: OpenAIClient,
        reference: OpenAIClient | None,
        prompts: Sequence[tuple[str, str]],
        effort: Effort | None = None,
        budget: Budget | None = None,
    ) -> None:
        if not prompts:
            raise PromptError("no prompt was given")
        self.server, self.reference, self.prompts = server, reference, prompts
        self.effort, self.budget = effort or Effort(), budget or Budget()
        self.max_tokens = min(self.effort.max_tokens, LONGEST)
        self.chance, self.sent = random.Random(self.effort.seed), 0
        self.bins = [0] * BINS
        self._greedy: dict[str, AnswerChoice] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def counting(self, server: OpenAIClient | None = None) -> OpenAIClient:
        """Who gets the next request, to be answered in what time is left. EffortSpentError."""
        left, server = self.budget.left, server or self.server
        if self.sent >= self.effort.requests or left <= 0:
            raise EffortSpentError
        self.sent += 1
        return replace(server, timeout=min(server.timeout, left))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream. Raises EffortSpentError, also in the middle of it."""
        for chunk in self.counting().stream(path, body):
            if self.budget.left <= 0:
                raise EffortSpentError
            yield chunk

    def complete(
        self,
        server: OpenAIClient,
        prompt: str,
        ways: Sequence[Mapping[str, float]] = ({},),
        **fields: Any,
    ) -> list[AnswerChoice]:
        """The answer to the first of the ``ways`` that the server takes, with logprobs if any."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": self.max_tokens, **fields}
        tried = [{**way, **logprobs} for way in ways for logprobs in _LOGPROBS]
        key = id(server), len(tried)
        index = self._taken.get(key, 0)
        while True:
            try:
                sent = {**body, **tried[index]}
                choices = choices_of(self.counting(server).answer("completions", sent))
                break
            except RequestRefusedError:
                index += 1
                if index == len(tried):
                    raise
        self._taken[key] = index
        return choices

    def greedy(self, prompt: str) -> AnswerChoice:
        if prompt not in self._greedy:
            self._greedy[prompt] = self.complete(self.server, prompt)[0]
        return self._greedy[prompt]

    def tests(self) -> list[DistributionTest]:
        """Of the samples with the chances that the server names."""
        if (tokens := sum(self.bins)) < 5 * BINS:
            return []
        outcome = goodness(self.bins, [1 / BINS] * BINS)
        return [DistributionTest("sampling", "each token / its logprobs", tokens, outcome)]


@dataclass
class Part:
    """How many of its ``unit`` were ``checked`` in one part, what is wrong, and what was left out.
    ``check``, given the text of a prompt, yields what is wrong. ``ties``: texts that part where
    rounding explains it."""

    name: str
    unit: str
    check: Callable[[Asking, Part, str], Iterator[str]]
    rounds: int = 0
    checked: int = 0
    requests: int = 0
    ties: int = 0
    failures: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def compare(
        self, text: AnswerChoice, due: AnswerChoice, penalties: Mapping[str, float] | None = None
    ) -> Iterator[str]:
        """Two greedy texts of one request."""
        divergence, tie = parting(text, due, penalties)
        self.ties += tie
        if divergence and not tie:
            yield divergence


def parting(
    text: AnswerChoice, due: AnswerChoice, penalties: Mapping[str, float] | None = None
) -> tuple[str, bool]:
    """Where two greedy texts part, "" if they are the same; and whether rounding explains it, by
    the scores of ``due``, which may or may not hold the ``penalties``."""
    if text.text == due.text:
        return "", False
    at = first_difference(text.spelt, due.spelt)
    if at is None:
        return f"{text.text[:60]!r} where {due.text[:60]!r} is due", False
    if at >= min(len(text.tokens), len(due.tokens)):
        return f"one text ends after {at} tokens", False
    written, wanted = text.spelt[at], due.spelt[at]
    _, logprob, listed = due.tokens[at]
    # At least so many, where what was written is not listed.
    difference = logprob - listed.get(written, min(listed.values())) if listed else math.inf
    least = difference
    if penalties is not None:
        lost = [_penalty(due.spelt[:at], token, penalties) for token in (wanted, written)]
        least = min(abs(difference), abs(difference - lost[0] + lost[1]))
    what = f"token {at} is {written!r}, {wanted!r} is due: {difference:.2f} nats likelier"
    return what, least <= TIE


def _penalty(before: Sequence[str], token: str, penalties: Mapping[str, float]) -> float:
    count = before.count(token)
    presence = penalties.get("presence_penalty", 0.0) if count else 0.0
    return count * penalties.get("frequency_penalty", 0.0) + presence
