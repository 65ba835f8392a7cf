"""What the parts of a server's certification share: who is asked, and how two answers compare."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.lab.certify.certificate import DistributionTest
from paceline.lab.certify.chisquare import goodness
from paceline.lab.certify.difference import first_difference
from paceline.lab.certify.servers.answers import AnswerChoice, AnsweringServer, ServerCompletion
from paceline.lab.openai_client import RequestRefusedError

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


class RequestsSpentError(Exception):
    """As many requests were sent as may be."""


@dataclass
class Asking:
    """The server, what it is compared with, and what may still be sent to them.

    ``reference`` is the same server with speculation off, or another one; None where there is
    neither. ``logprobs``: all that the server gave. ``bins``: tokens of its samples, by their
    position in the distribution that it names with them.
    """

    server: AnsweringServer
    reference: AnsweringServer | None
    max_tokens: int
    requests: int
    chance: random.Random
    sent: int = 0
    logprobs: list[float] = field(default_factory=list)
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    _greedy: dict[str, ServerCompletion] = field(default_factory=dict)
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def answer(
        self, path: str, body: Mapping[str, Any], server: AnsweringServer | None = None
    ) -> dict[str, Any]:
        """The whole answer. Raises RequestsSpentError and what the client raises, as ``stream``."""
        return self._sender(server).answer(path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream."""
        return self._sender(None).stream(path, body)

    def _sender(self, server: AnsweringServer | None) -> AnsweringServer:
        if self.sent >= self.requests:
            raise RequestsSpentError
        self.sent += 1
        return server or self.server

    def complete(
        self,
        server: AnsweringServer,
        prompt: str,
        ways: Sequence[Mapping[str, float]] = ({},),
        **fields: Any,
    ) -> ServerCompletion:
        """The answer to the first of the ``ways`` to ask that the server takes: with logprobs where
        it gives them."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": self.max_tokens, **fields}
        tried = [{**way, **logprobs} for way in ways for logprobs in _LOGPROBS]
        key = id(server), len(tried)
        for index in range(self._taken.get(key, 0), len(tried)):
            try:
                answer = self.answer("completions", {**body, **tried[index]}, server)
            except RequestRefusedError:
                if index == len(tried) - 1:
                    raise
                continue
            self._taken[key] = index
            break
        completion = ServerCompletion.of(answer)
        if server is self.server:
            self.logprobs += [t.logprob for choice in completion.choices for t in choice.tokens]
        return completion

    def greedy(self, prompt: str) -> ServerCompletion:
        """The server's greedy text, asked for once."""
        if prompt not in self._greedy:
            self._greedy[prompt] = self.complete(self.server, prompt)
        return self._greedy[prompt]

    def tests(self) -> list[DistributionTest]:
        """Of the samples with the chances that the server names."""
        tokens, even = sum(self.bins), [1 / BINS] * BINS
        if tokens < 5 * BINS:
            return []
        about = "sampling", "each token / its logprobs", tokens
        return [DistributionTest(*about, goodness(self.bins, even))]


@dataclass
class Part:
    """What was ``checked`` in one part, by its ``unit``, what is wrong, and what was left out.

    After one of the ``ties``, which rounding explains, a text is not compared any further.
    """

    name: str
    unit: str
    check: Callable[[Asking, Part, str, str], None]  # with the name and the text of a prompt
    rounds: int = 0
    checked: int = 0
    requests: int = 0
    ties: int = 0
    failures: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def compare(
        self,
        what: str,
        text: AnswerChoice,
        due: AnswerChoice,
        penalties: Mapping[str, float] | None = None,
    ) -> None:
        """Two greedy texts of one request."""
        divergence, tie = parting(text, due, penalties) or (None, False)
        self.ties += tie
        if divergence is not None and not tie:
            self.problems.append(f"{what}: {divergence}")


def parting(
    text: AnswerChoice, due: AnswerChoice, penalties: Mapping[str, float] | None = None
) -> tuple[str, bool] | None:
    """Where two greedy texts part, and whether rounding explains it; None if they are the same.

    The scores are those of ``due``, whose logprobs may or may not hold the ``penalties``.
    """
    if text.text == due.text:
        return None
    at = first_difference(text.spelt, due.spelt)
    if at is None:
        return f"{text.text[:60]!r} where {due.text[:60]!r} is due", False
    if at >= min(len(text.tokens), len(due.tokens)):
        return f"one text ends after {at} tokens", False
    written, wanted = text.spelt[at], due.spelt[at]
    difference = least = gap(due, at, written)
    if penalties is not None:
        lost = [_penalty(due.spelt[:at], token, penalties) for token in (wanted, written)]
        least = min(abs(difference), abs(difference - lost[0] + lost[1]))
    what = f"token {at} is {written!r}, {wanted!r} is due: {difference:.2f} nats likelier"
    return what, least <= TIE


def _penalty(before: Sequence[str], token: str, penalties: Mapping[str, float]) -> float:
    """What OpenAI's penalties take from a token's logit."""
    count = before.count(token)
    presence = penalties.get("presence_penalty", 0.0) if count else 0.0
    return count * penalties.get("frequency_penalty", 0.0) + presence


def gap(choice: AnswerChoice, at: int, token: str) -> float:
    """Nats by which what was written is likelier than ``token``; at least, where that is not
    listed. Infinite if the server gives no logprobs."""
    _, logprob, listed = choice.tokens[at]
    return logprob - listed.get(token, min(listed.values())) if listed else math.inf
