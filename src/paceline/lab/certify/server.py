"""Certifies a server by its answers: sends it prompts, within the effort and the time, and compares
greedy texts, logprobs and samples with what it should have answered."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.errors import ConfigError, PromptError
from paceline.lab.budget import Budget
from paceline.lab.certify.certificate import (
    Certificate,
    Problem,
    ResultTable,
    missing_evidence,
    rank_tests,
    smallest_bias,
    tests_table,
)
from paceline.lab.certify.chisquare import RankCounts
from paceline.lab.certify.decoding import first_difference
from paceline.lab.certify.effort import MAX_SERVER_TOKENS, Effort
from paceline.lab.openai_client import OpenAIClient, ScoredText, ServerError
from paceline.lab.report.document import Column

# In nats: logprobs that differ by no more are a near tie. Two logits of a bf16 model may each be
# off by a rounding step, which is 0.125 for logits from 16 on.
TIE = 0.3
_TOP = 5  # logprobs per position: the most that /v1/completions returns on every server
# The whole distribution: servers truncate by default, or apply the model's own penalty.
_FIELDS = {"logprobs": _TOP, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_MIN_UNCERTAIN = 10  # tokens of a text of which at least one has a probability below 1
_RESCORED = 3  # positions per text


def connect(
    url: str, model: str | None = None, key: str | None = None
) -> tuple[OpenAIClient, OpenAIClient | None]:
    """Clients for the server at a URL: as it is, and with speculation switched off per request
    (None if the server cannot do that). Without ``model``, the first model that the server lists is
    used. Raises ConfigError if there is no server, or it does not list the model."""
    client = OpenAIClient.at(url, key)
    try:
        listed = client.models()
    except ServerError as error:
        raise ConfigError(
            f"no server answers at {error}; start it, or give another --url"
        ) from None
    named = next((item for item in listed if model in (None, item["id"])), None)
    if named is None:
        names = ", ".join(str(item["id"]) for item in listed) or "no model"
        raise ConfigError(f"the server at {url} lists {names}; name one with --model")
    server = replace(client, fields={"model": str(named["id"])})
    if named.get("owned_by") != "paceline":
        return server, None
    return server, replace(server, fields={**server.fields, "speculation": {"drafter": "none"}})


def name_of(server: OpenAIClient) -> str:
    off = ", speculation off" if "speculation" in server.fields else ""
    return f"{server.fields['model']} at {server.url.removesuffix('/v1')}{off}"


@dataclass
class Part:
    """One part of the certification: how many of ``unit`` were checked, differences that rounding
    explains, and problems."""

    name: str
    unit: str
    checked: int = 0
    ties: int = 0
    problems: list[str] = field(default_factory=list)


_PARTS = (
    Column("part", "part", "name"),
    Column("checked", "checked"),
    Column("unit", "of"),
    Column("ties", "ties"),
    Column("problems", "problems", shown=len),
)


class _SpentError(Exception):
    """The most requests have been sent, or the time is over."""


class ServerCertifier:
    """One certification of ``server``, compared with ``reference`` if there is one. ``prompts``:
    (name, text). ``sent``: requests so far. ``certificate`` can be called at any time."""

    def __init__(
        self,
        server: OpenAIClient,
        reference: OpenAIClient | None,
        prompts: list[tuple[str, str]],
        effort: Effort | None = None,
        budget: Budget | None = None,
    ) -> None:
        if not prompts:
            raise PromptError("no prompt was given")
        self.server, self.reference, self.prompts = server, reference, prompts
        self.effort, self.budget = effort or Effort(), budget or Budget()
        self.greedy = Part("greedy", "texts")
        self.logprobs = Part("logprobs", "positions")
        self.sampling = Part("sampling", "samples")
        self.sent, self.ranks = 0, RankCounts()
        self._random = random.Random(self.effort.seed)

    def run(self, advance: Callable[[str], None] = lambda description: None) -> None:
        """Compare a greedy text and draw a sample with each prompt, then draw more samples, until
        effort or time is spent. ``advance`` is called before each request. Raises ServerError if
        the server fails, refuses a request or gives no logprobs."""
        self.advance = advance
        try:
            for name, prompt in self.prompts:
                self._compare(name, prompt)
                self._sample(name, prompt)
            for name, prompt in itertools.cycle(self.prompts):
                self._sample(name, prompt)
        except _SpentError:
            pass

    def _complete(self, shown: str, server: OpenAIClient, prompt: str, **fields: Any) -> ScoredText:
        if self.sent >= self.effort.requests or self.budget.left <= 0:
            raise _SpentError
        self.sent += 1
        self.advance(shown)
        max_tokens = min(self.effort.max_tokens, MAX_SERVER_TOKENS)
        body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, **_FIELDS, **fields}
        answer = server.complete(**body)
        if answer.text and not answer.tokens:
            raise ServerError(f"{server.url} gives no logprobs, which are needed to certify it")
        return answer

    def _compare(self, name: str, prompt: str) -> None:
        greedy = self._complete(f"greedy: {name}", self.server, prompt)
        self.logprobs.problems += (f"{name}: {what}" for what in _wrong_logprobs(greedy))
        problems = self.greedy.problems
        for at, token in enumerate(greedy.tokens):
            gap = max(token.likeliest.values(), default=token.logprob) - token.logprob
            if gap > TIE:
                other = f"another is {gap:.2f} nats likelier by the server's own logprobs"
                problems.append(f"{name}: token {at} is {token.text!r}, {other}")
                break
        if self.reference is not None:
            expected = self._complete(f"greedy: {name}: reference", self.reference, prompt)
            problems += (f"{name}: {what}" for what in self._differs(greedy, expected))
        self.greedy.checked += 1
        self._rescore(name, prompt, greedy)

    def _differs(self, answer: ScoredText, expected: ScoredText) -> Iterator[str]:
        """Where two greedy answers to one request differ first, unless that is a near tie by the
        logprobs of ``expected``."""
        at = first_difference(answer.token_texts, expected.token_texts)
        if at is None or answer.text == expected.text:
            return
        if at >= min(len(answer.tokens), len(expected.tokens)):
            yield f"one text ends after {at} tokens"
            return
        written, (wanted, logprob, listed) = answer.token_texts[at], expected.tokens[at]
        # A lower bound if the written token is not among the likeliest ones.
        gap = logprob - listed.get(written, min(listed.values())) if listed else math.inf
        if gap <= TIE:
            self.greedy.ties += 1
        else:
            likelier = f"which is {gap:.2f} nats likelier"
            yield f"token {at} is {written!r}, expected {wanted!r}, {likelier}"

    def _rescore(self, name: str, prompt: str, greedy: ScoredText) -> None:
        """The logprobs of a token must be the same if the text before it is the prompt."""
        # Tokens with an incomplete character cannot be sent back as text.
        texts = greedy.token_texts
        incomplete = (at for at, t in enumerate(texts) if "\ufffd" in t or t.startswith("bytes:"))
        positions = range(1, min([len(texts), *incomplete]))
        for at in self._random.sample(positions, min(_RESCORED, len(positions))):
            text, shown = prompt + "".join(texts[:at]), f"logprobs: {name}"
            again = self._complete(shown, self.server, text, max_tokens=1)
            counts = again.prompt_tokens, greedy.prompt_tokens
            retokenized = counts[0] and counts[1] and counts[0] != counts[1] + at
            listed = again.tokens[0].likeliest if again.tokens else {}
            if retokenized or not listed:
                continue  # the same text has other tokens as a prompt, or it ends there
            self.logprobs.checked += 1
            token, claimed, _ = greedy.tokens[at]
            logprob, likeliest = listed.get(token, min(listed.values())), max(listed.values())
            off = claimed - logprob if token not in listed else abs(claimed - logprob)
            if max(off, likeliest - logprob) > TIE:
                self.logprobs.problems.append(
                    f"{name}: token {at}, {token!r}: logprob {claimed:.3f}, re-scored "
                    f"{logprob:.3f}, where the likeliest has {likeliest:.3f}"
                )

    def _sample(self, name: str, prompt: str) -> None:
        sample = self._complete(f"sampling: {name}", self.server, prompt, temperature=1.0)
        self.sampling.checked += 1
        for token, _, top in sample.tokens:
            listed = sorted(top.items(), key=lambda item: -item[1])[:_TOP]
            names = [other for other, _ in listed]
            probs = [_probability(logprob) for _, logprob in listed]
            probs.append(max(0.0, 1.0 - sum(probs)))  # of all tokens that are not listed
            index = names.index(token) if token in names else len(names)
            self.ranks.add(torch.tensor(probs, dtype=torch.float64), [index])

    def certificate(self) -> Certificate:
        parts, reference = (self.greedy, self.logprobs, self.sampling), self.reference
        tested = ("sampling", "sampled tokens, by their logprobs,", self.ranks)
        tests = rank_tests([tested])
        problems = [Problem(part.name, what) for part in parts for what in part.problems]
        problems += (problem for test in tests for problem in test.problems)
        lacks = missing_evidence(self.greedy.checked, bias := smallest_bias(tests))
        if not self.logprobs.checked:
            lacks.append("no logprobs were re-scored")
        notes = [
            "texts were not compared: there is no --against, and no way to switch speculation off"
        ]
        return Certificate(
            title=f"Is {name_of(self.server)} lossless?",
            facts={
                "server": name_of(self.server),
                "reference": None if reference is None else name_of(reference),
                "requests": self.sent,
                "seconds": self.budget.spent,
                "smallest_bias": bias,
            },
            tables=(ResultTable("parts", "Parts", _PARTS, parts), tests_table(tests)),
            problems=problems,
            missing_evidence=lacks,
            notes=[] if reference else notes,
            completed=f"{self.budget.spent:.0f} s, {self.sent} requests",
            certified=f"no problem in {self.sent} requests; no bias in the samples, of which "
            f"{bias:.1%} or more would have been detected",
        )


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 1.0))  # a server may claim any number


def _wrong_logprobs(answer: ScoredText) -> Iterator[str]:
    """What is wrong with the logprobs of an answer by themselves."""
    tops = [list(token.likeliest.values()) for token in answer.tokens]
    if len(tops) >= _MIN_UNCERTAIN and not any(token.logprob for token in answer.tokens):
        yield "all logprobs are 0.0"
    if any(sum(map(_probability, top)) > 1.01 for top in tops):
        yield "the probabilities of a position sum to more than 1"
    if 0 < (without := tops.count([])) < len(tops):
        yield f"{without} of {len(tops)} tokens have no alternatives"
