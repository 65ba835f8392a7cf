"""Requests to the server under test: sends them within the effort, and compares greedy answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import ConfigError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import DistributionTest
from paceline.lab.certify.chisquare import goodness_of_fit
from paceline.lab.certify.decoding import first_difference
from paceline.lab.certify.effort import MAX_SERVER_TOKENS, Effort
from paceline.lab.openai_client import (
    AnswerChoice,
    OpenAIClient,
    RequestRefusedError,
    ServerFailedError,
    choices_of,
)

# In nats: logprobs that differ by no more are a near tie. Two logits of a bf16 model may each be
# off by a rounding step, which is 0.125 for logits from 16 on.
TIE = 0.3
TOP_LOGPROBS = 5  # per position: the most that /v1/completions returns on every server
# Tried in turn until the server accepts the fields. The explicit repetition penalty overrides the
# model's own, which some servers apply by default.
_LOGPROBS_FIELDS: tuple[dict[str, float], ...] = (
    {"logprobs": TOP_LOGPROBS, "repetition_penalty": 1.0},
    {"logprobs": TOP_LOGPROBS},
    {},
)
BINS = 10


def connect(
    url: str, model: str | None = None, key: str | None = None, timeout: float = 120.0
) -> tuple[OpenAIClient, OpenAIClient | None]:
    """Clients for the server at a URL: as it is, and with speculation switched off per request
    (None if the server cannot do that). Without ``model``, the first model that the server lists is
    used. Raises ConfigError if there is no server, or it does not list the model."""
    client = OpenAIClient.at(url, key, timeout)
    try:
        listed = client.models()
    except (RequestRefusedError, ServerFailedError) as error:
        raise ConfigError(
            f"no server answers at {client.url}/models: {error}; start it, or give another --url"
        ) from None
    matching = [item for item in listed if model in (None, item["id"])]
    strict = any(item.get("owned_by") in ("paceline", "vllm") for item in listed)
    if not matching and (model is None or strict):  # other servers accept any model name
        names = ", ".join(str(item["id"]) for item in listed) or "no model"
        missing = "" if model is None else f"not {model}, but "
        raise ConfigError(f"the server at {url} lists {missing}{names}; name one with --model")
    fields: dict[str, Any] = {"model": model or str(matching[0]["id"])}
    server = replace(client, fields=fields)
    if not any(item.get("owned_by") == "paceline" for item in matching):
        return server, None
    return server, replace(client, fields={**fields, "speculation": {"drafter": "none"}})


def name_of(server: OpenAIClient) -> str:
    off = ", speculation off" if "speculation" in server.fields else ""
    return f"{server.fields['model']} at {server.url.removesuffix('/v1')}{off}"


class EffortSpentError(Exception):
    """The most requests have been sent, or the time is over."""


class ServerSession:
    """Sends requests to ``server``, and to ``reference`` if there is one, within an effort and a
    budget. ``prompts``: (name, text). ``sent``: requests so far. ``bins``: histogram of sampled
    tokens over their randomized rank in the distribution that the server reports."""

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
        self.max_tokens = min(self.effort.max_tokens, MAX_SERVER_TOKENS)
        self.random, self.sent = random.Random(self.effort.seed), 0
        self.bins = [0] * BINS
        self._greedy: dict[str, AnswerChoice] = {}
        # Index of the fields that were accepted, by server and number of alternatives.
        self._accepted_fields: dict[tuple[int, int], int] = {}

    def next_client(self, server: OpenAIClient | None = None) -> OpenAIClient:
        """A client for one more (counted) request in the time left. Raises EffortSpentError."""
        left, server = self.budget.left, server or self.server
        if self.sent >= self.effort.requests or left <= 0:
            raise EffortSpentError
        self.sent += 1
        return replace(server, timeout=min(server.timeout, left))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream. Raises EffortSpentError, also in the middle of the stream."""
        for chunk in self.next_client().stream(path, body):
            if self.budget.left <= 0:
                raise EffortSpentError
            yield chunk

    def complete(
        self,
        server: OpenAIClient,
        prompt: str,
        alternatives: Sequence[Mapping[str, float]] = ({},),
        **fields: Any,
    ) -> list[AnswerChoice]:
        """Complete a prompt with ``fields`` and the first of the ``alternatives`` that the server
        accepts, with logprobs if it gives them. Raises RequestRefusedError if it accepts none."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": self.max_tokens, **fields}
        extras = [{**some, **logprobs} for some in alternatives for logprobs in _LOGPROBS_FIELDS]
        key = id(server), len(extras)
        index = self._accepted_fields.get(key, 0)
        while True:
            try:
                request = {**body, **extras[index]}
                choices = choices_of(self.next_client(server).answer("completions", request))
                break
            except RequestRefusedError:
                index += 1
                if index == len(extras):
                    raise
        self._accepted_fields[key] = index
        return choices

    def greedy(self, prompt: str) -> AnswerChoice:
        """The server's greedy completion of a prompt, requested once."""
        if prompt not in self._greedy:
            self._greedy[prompt] = self.complete(self.server, prompt)[0]
        return self._greedy[prompt]

    def tests(self) -> list[DistributionTest]:
        """The chi-square test of sampled tokens against their logprobs, from 5 tokens a bin on."""
        if (tokens := sum(self.bins)) < 5 * BINS:
            return []
        outcome = goodness_of_fit(self.bins, [1 / BINS] * BINS)
        return [DistributionTest("sampling", "each token / its logprobs", tokens, outcome)]


@dataclass
class Part:
    """One part of the certification and its results. ``check`` is called with the text of a prompt
    and yields problems; ``checked`` counts what it checked, in ``unit``. ``ties``: differences that
    rounding explains. ``notes``: what was left out, and why."""

    name: str
    unit: str
    check: Callable[[ServerSession, Part, str], Iterator[str]]
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
        self,
        answer: AnswerChoice,
        expected: AnswerChoice,
        penalties: Mapping[str, float] | None = None,
    ) -> Iterator[str]:
        """Yields where two greedy answers to one request differ first, unless that is a near tie by
        the logprobs of ``expected``. Servers report logprobs before or after applying
        ``penalties``; it is a near tie if it is one in either case."""
        if answer.text == expected.text:
            return
        at = first_difference(answer.token_texts, expected.token_texts)
        if at is None:
            yield f"the text is {answer.text[:60]!r}, expected {expected.text[:60]!r}"
            return
        if at >= min(len(answer.tokens), len(expected.tokens)):
            yield f"one text ends after {at} tokens"
            return
        written, wanted = answer.token_texts[at], expected.token_texts[at]
        _, logprob, listed = expected.tokens[at]
        # A lower bound if the written token is not among the likeliest ones.
        gap = logprob - listed.get(written, min(listed.values())) if listed else math.inf
        before, smallest_gap = expected.token_texts[:at], gap
        if penalties is not None:
            penalty_gap = _penalty(before, wanted, penalties) - _penalty(before, written, penalties)
            smallest_gap = min(abs(gap), abs(gap - penalty_gap))
        self.ties += (tie := smallest_gap <= TIE)
        if not tie:
            difference = f"token {at} is {written!r}, expected {wanted!r}"
            yield f"{difference}, which is {gap:.2f} nats likelier"


def _penalty(before: Sequence[str], token: str, penalties: Mapping[str, float]) -> float:
    """What OpenAI's penalties subtract from a token's logit after the tokens ``before``."""
    count = before.count(token)
    presence = penalties.get("presence_penalty", 0.0) if count else 0.0
    return count * penalties.get("frequency_penalty", 0.0) + presence
