"""What the parts of a server's certification share: who is asked, and how two answers compare."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.lab.certify.chisquare import ChiSquare
from paceline.lab.certify.servers.answers import (
    Answering,
    Said,
    ServerRefusedError,
    choices_of,
    tokens_of,
)
from paceline.lab.difference import first_difference

# Nats. Two logits of a bf16 model may each be off by a rounding step, which is 0.125 from 16 on.
TIE = 0.3
TOP = 5  # likeliest tokens asked for at each place; what /v1/completions gives everywhere
# What is asked for, until a server takes it. Some have a penalty of their model's own.
_WAYS: tuple[dict[str, float], ...] = (
    {"logprobs": TOP, "repetition_penalty": 1.0},
    {"logprobs": TOP},
    {},
)


class RequestsSpentError(Exception):
    """As many requests were sent as may be."""


@dataclass
class Asking:
    """The server, what it is compared with, and what may still be sent to them.

    ``reference`` is the same server with speculation off, or another one; None where there is
    neither. ``values``: all logprobs that the server gave.
    """

    server: Answering
    reference: Answering | None
    max_tokens: int
    requests: int
    chance: random.Random
    sent: int = 0
    values: list[float] = field(default_factory=list)
    _greedy: dict[str, tuple[Said, int | None]] = field(default_factory=dict)
    _taken: dict[int, int] = field(default_factory=dict)  # by server: which of _WAYS

    def count(self) -> None:
        """One more request. Raises RequestsSpentError."""
        if self.sent >= self.requests:
            raise RequestsSpentError
        self.sent += 1

    def whole(self, server: Answering, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.count()
        return server.answer(path, body)

    def completion(self, server: Answering, prompt: str, **more: Any) -> Said:
        return self.completions(server, prompt, **more)[0][0]

    def completions(
        self, server: Answering, prompt: str, **more: Any
    ) -> tuple[list[Said], dict[str, Any]]:
        """Choices of a completion with logprobs where the server gives them, and its answer."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": self.max_tokens, **more}
        ways = _WAYS[self._taken.get(id(server), 0) :]
        for way in ways:
            try:
                answer = self.whole(server, "completions", {**body, **way})
            except ServerRefusedError:
                if way is ways[-1]:
                    raise
                continue
            self._taken[id(server)] = _WAYS.index(way)
            break
        choices = choices_of(answer)
        if server is self.server:
            self.values += [value for choice in choices for value in choice.logprobs]
        return choices, answer

    def greedy(self, prompt: str) -> tuple[Said, int | None]:
        """The server's greedy text, asked for once, and the tokens of its prompt."""
        if prompt not in self._greedy:
            (one_answer, *_), answer = self.completions(self.server, prompt)
            self._greedy[prompt] = one_answer, tokens_of(answer, "prompt")
        return self._greedy[prompt]


@dataclass(frozen=True)
class PartResult:
    """What was asked in one part, how much of its unit was looked at, and what was found."""

    part: str
    requests: int
    looked_at: int
    unit: str
    seconds: float
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    ties: int


@dataclass
class CheckPart:
    """One part of a certification: ``look`` is called for one prompt after the other.

    ``looked_at`` counts what the part is about, its ``unit``. What is wrong goes to ``problems``,
    what could not be looked at to ``notes``. After one of the ``ties``, which rounding explains,
    a text is not looked at any further.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    asking: Asking
    looked_at: int = 0
    requests: int = 0
    ties: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def look(self, name: str, prompt: str) -> None:
        raise NotImplementedError

    def tests(self) -> list[tuple[str, int, ChiSquare]]:
        """What, of how many, and the outcome; asked for at the end."""
        return []

    def compare(
        self, what: str, one: Said, other: Said, penalties: Mapping[str, float] | None = None
    ) -> None:
        """Two greedy texts of one request."""
        parted = parting(one, other, penalties)
        if parted is not None and parted[1]:
            self.ties += 1
        elif parted is not None:
            self.problems.append(f"{what}: {parted[0]}")

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def result(self) -> PartResult:
        names = ("requests", "looked_at", "unit", "seconds", "ties")
        counts = {name: getattr(self, name) for name in names}
        return PartResult(self.name, **counts, problems=(*self.problems,), notes=(*self.notes,))


def parting(
    one: Said, other: Said, penalties: Mapping[str, float] | None = None
) -> tuple[str, bool] | None:
    """Where two greedy texts part, and whether rounding explains it; None if they are the same.

    The scores are those of ``other``, whose logprobs may or may not hold the ``penalties``.
    """
    if one.text == other.text:
        return None
    at = first_difference(one.tokens, other.tokens)
    if at is None:
        return f"{one.text[:60]!r} where {other.text[:60]!r} is due", False
    if at >= min(len(one.tokens), len(other.tokens)):
        return f"one text ends after {at} tokens", False
    pair, due = one.tokens[at], other.tokens[at]
    difference = least = gap(other, at, pair)
    if penalties is not None:
        lost = [penalised(other.tokens[:at], token, penalties) for token in (due, pair)]
        least = min(abs(difference), abs(difference - lost[0] + lost[1]))
    return f"token {at} is {pair!r}, {due!r} is due: {difference:.2f} nats likelier", least <= TIE


def penalised(before: tuple[str, ...], token: str, penalties: Mapping[str, float]) -> float:
    """What OpenAI's penalties take from a token's logit."""
    count = before.count(token)
    presence = penalties.get("presence_penalty", 0.0) if count else 0.0
    return count * penalties.get("frequency_penalty", 0.0) + presence


def gap(answer: Said, at: int, token: str) -> float:
    """Nats by which what was answer is likelier than ``token``; at least, where that is not listed.

    Infinite if the server gives no logprobs.
    """
    if at >= min(len(answer.likeliest), len(answer.logprobs)) or not answer.likeliest[at]:
        return math.inf
    listed = answer.likeliest[at]
    return answer.logprobs[at] - listed.get(token, min(listed.values()))
