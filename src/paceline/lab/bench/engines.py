"""Methods of a comparison (``plain``, drafters with a length such as ``ngram@5``, servers such as
``url:http://A:1``) and the engines that run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from paceline.core.params import SamplingParams
from paceline.drafters import DRAFTERS, parse_draft
from paceline.engine.driver import DraftCounts, Drive, StepTotals, sequence
from paceline.errors import ConfigError, PacelineError
from paceline.lab.bench.runner import (
    BenchEngine,
    BenchRequest,
    Length,
    Method,
    TimedAnswer,
    TimedRun,
)
from paceline.lab.openai_client import (
    AnswerChoice,
    OpenAIClient,
    RequestRefusedError,
    ServerFailedError,
    choices_of,
)
from paceline.llm import LLM

PLAIN = "plain"
_MAX_LENGTH = 64


def parse_method(text: str, draft: str | None, length: Length = "auto") -> Method:
    """Parse a draft spec, optionally with ``@LENGTH``; the default is ``length``. ``draft``: the
    spec that the word "draft" stands for. Raises ConfigError."""
    text = text.strip()
    body, named_length = _split(text)
    head, _, address = text.partition(":")
    if head == "url":
        if not address:
            raise ConfigError(f"method {text!r} needs its address: url:http://HOST:PORT")
        return Method(text, None, None, address)
    if body in (PLAIN, "none"):
        if named_length is not None:
            raise ConfigError(f"method {text!r}: plain decoding has no draft length; omit the @")
        return Method(PLAIN, length=0)
    if body == "draft":
        if draft is None:
            raise ConfigError(f"method {text!r}: no draft is named; add --draft, or name it here")
        body = draft
    else:
        try:
            parse_draft(body)
        except ConfigError as error:
            known = f"{PLAIN}, draft or url:http://HOST:PORT"
            raise ConfigError(f"method {text!r} is not {known}, and {error}") from None
    return Method(text, body, length if named_length is None else named_length)


def parse_methods(
    texts: Sequence[str], draft: str | None, length: Length | tuple[int, ...] = "auto"
) -> list[Method]:
    """Parse all methods; plain decoding comes first. A drafter without a length of its own gets
    ``length``, or becomes one method per length of a tuple. Raises ConfigError."""
    methods = [Method(PLAIN, length=0)]
    lengths = length if isinstance(length, tuple) else ()
    for text in texts:
        method = parse_method(text, draft, "auto" if isinstance(length, tuple) else length)
        if lengths and method.draft is not None and _split(text)[1] is None:
            methods += [replace(method, name=f"{method.name}@{n}", length=n) for n in lengths]
        else:
            methods.append(method)
    return list({method.name: method for method in methods}.values())


def _split(text: str) -> tuple[str, Length | None]:
    """Split off ``@LENGTH``. A path may contain @, but must not end in @NUMBER."""
    body, at, tail = text.rpartition("@")
    if not at or not (tail == "auto" or tail.lstrip("-").isdecimal() or body in DRAFTERS):
        return text, None
    if tail != "auto" and not (tail.isdecimal() and 1 <= int(tail) <= _MAX_LENGTH):
        raise ConfigError(f"method {text!r}: draft lengths go from 1 to {_MAX_LENGTH}, or auto")
    return body, "auto" if tail == "auto" else int(tail)


class Paceline(BenchEngine):
    """Our engine, with requests from ``clients`` (see Drive). ``build`` creates the LLM. It is
    called again at every ``refresh`` if the drafter learns from requests."""

    def __init__(self, method: Method, build: Callable[[], LLM], clients: int) -> None:
        self.name, self.method = method.name, method
        self.llm = build()
        self._build = build if method.learns_across_requests else None
        self._clients = clients

    def refresh(self) -> None:
        if self._build is not None:
            self.llm = self._build()

    def run(self, requests: Sequence[BenchRequest]) -> TimedRun:
        """Raises PacelineError if a request fails or does not fit into the cache."""
        seqs = []
        for prompt, params in ((request.prompt, request.params) for request in requests):
            ends = frozenset[int]() if params.ignore_eos else self.llm.end_tokens
            seqs.append(sequence(prompt, params, ends | {*params.stop_token_ids}))
        drive = Drive(self.llm.engine, seqs, self._clients).run()
        answers = [
            TimedAnswer(
                tuple(seq.tokens[seq.prompt_length :]),
                tuple((moment - seq.queued, count) for moment, count in seq.arrivals),
            )
            for seq in drive.seqs
        ]
        decoding = StepTotals.of(step for step in drive.steps if step.decodes)
        return TimedRun(answers, drive.seconds, drive.counts, decoding)


class EngineFactory:
    """Creates engines around one target, without prefix sharing; ``options``: of ``with_draft``."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self._llm = llm
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        # By method, for servers: see ServedEngine.differences.
        self.unequal: dict[str, dict[str, str]] = {}

    def create(self, method: Method, clients: int, **options: Any) -> BenchEngine:
        """An engine for ``clients`` concurrent requests. ``options`` override the common ones.
        Raises what loading a drafter or a request to a server raises."""
        if method.url is not None:
            served = open_served(method.name, method.url, clients, self._llm)
            # Shared by the engines of a method at all numbers of clients.
            served.differences = self.unequal.setdefault(method.name, served.differences)
            return served
        length = method.length if method.draft is not None else 0
        merged = {"draft_length": length, "max_batch_size": clients, **self._options, **options}
        build = partial(self._llm.with_draft, method.draft, **merged)
        return Paceline(method, build, clients)


EQUAL = "equal"
# Request options without which a server's runs differ from ours, and how they differ then.
ASPECTS = {
    "ids": "prompts are sent as text and tokenized by the server",
    "ignore_eos": "refused: answers end at the model's end token",
}
_TIMEOUT = 600.0  # seconds between two deliveries: a long prompt on a slow machine
# Options sent if the server accepts them: prompts as token ids, no end token, ids and counts in the
# answer, no prompt cache (llama.cpp), and no truncation or penalty by default.
_REQUEST_OPTIONS: dict[str, dict[str, Any]] = {
    "ids": {},
    "ignore_eos": {"ignore_eos": True},
    "return_token_ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "cache_prompt": {"cache_prompt": False},
    "top_k": {"top_k": -1},
    "min_p": {"min_p": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.0},
}


class BaselineFailedError(PacelineError):
    """Another engine did not answer, or its answer cannot be one of the target."""


_FAILURES = (RequestRefusedError, ServerFailedError)

# An event of a stream, with the seconds since the request was sent. The last one has the usage.
Delivery = tuple[float, AnswerChoice]


@dataclass
class ServedEngine(BenchEngine):
    """A server of another engine, whose answers are checked against the vocabulary of ``llm``.
    ``accepted``: its request options. ``differences``: by aspect, of its runs from ours."""

    name: str
    client: OpenAIClient
    clients: int
    llm: LLM
    accepted: set[str] = field(default_factory=set)
    differences: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ASPECTS, EQUAL))
    _answers: int = 0
    _short_answers: int = 0

    def run(self, requests: Sequence[BenchRequest]) -> TimedRun:
        """Each delivery is counted as one target step. Raises BaselineFailedError."""
        start = time.perf_counter()
        try:
            with ThreadPoolExecutor(self.clients) as pool:
                all_answers = list(pool.map(self._deliveries, requests))
        except _FAILURES as error:
            raise BaselineFailedError(f"{self.name} failed ({error}); see its log") from None
        seconds = time.perf_counter() - start
        answers = [self._answer(*pair) for pair in zip(requests, all_answers, strict=True)]
        steps = sum(len(answer.arrivals) for answer in answers)
        accepted = sum(answer.count for answer in answers) - steps
        counts = DraftCounts(target_steps=steps, accepted=accepted)
        return TimedRun(answers, seconds, counts, reports_drafted=False)

    def _deliveries(self, request: BenchRequest) -> list[Delivery]:
        params, ids, deliveries = request.params, list(request.prompt), list[Delivery]()
        body: dict[str, Any] = {
            "prompt": ids if "ids" in self.accepted else str(self.llm.tokenizer.decode(ids)),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        for option in self.accepted - (set() if params.ignore_eos else {"ignore_eos"}):
            body |= _REQUEST_OPTIONS[option]
        start = time.perf_counter()
        for event in self.client.stream("completions", body):
            seconds = time.perf_counter() - start
            deliveries.append((seconds, choices_of(event, streamed=True)[0]))
        return deliveries

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _answer(self, request: BenchRequest, deliveries: Sequence[Delivery]) -> TimedAnswer:
        """Tokens and arrival times of an answer, whose ``differences`` are noted. Token ids and
        counts come from the server if it gives them, otherwise from tokenizing the text."""
        parts = [(seconds, part) for seconds, part in deliveries if part.text or part.ids]
        vocabulary = self.llm.target.vocab_size
        token_ids = tuple(token for _, part in parts for token in part.ids)
        tokens = token_ids or self._ids_of("".join(part.text for _, part in parts))
        counts = [n for _, d in deliveries if (n := d.completion_tokens) is not None]
        count = len(token_ids) or (counts or [len(tokens)])[-1]
        if not parts or not count:
            raise BaselineFailedError(f"{self.name} answered without a token; see its log")
        if max(tokens, default=0) >= vocabulary:
            raise BaselineFailedError(
                f"{self.name} returned token id {max(tokens)}, but the target's vocabulary has "
                f"{vocabulary}: it runs another model; serve a form of the target"
            )
        weights = [len(part.ids) or len(self._ids_of(part.text)) or 1 for _, part in parts]
        shares = apportion(count, weights)
        arrivals = ((at, n) for (at, _), n in zip(parts, shares, strict=True) if n)
        prompt_counts = [n for _, d in deliveries if (n := d.prompt_tokens) is not None]
        self._answers += 1
        length = len(request.prompt)
        if prompt_counts and prompt_counts[-1] != length:
            differs = f"its prompt had {prompt_counts[-1]} tokens where ours had {length}"
            self.differences["ids"] = differs
        if request.params.ignore_eos and count < request.params.max_tokens:
            self._short_answers += 1
            early = f"{self._short_answers} of {self._answers} answers ended early"
            self.differences["ignore_eos"] = early
        return TimedAnswer(tokens, tuple(arrivals), count)

    def probe_options(self) -> None:
        """Find out which request options the server accepts: send a short request without any,
        which must succeed, then one with each of them. Raises what a failed request raises."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        request = BenchRequest(self._ids_of("Hello there"), params)
        self._deliveries(request)
        for option in _REQUEST_OPTIONS:
            self.accepted.add(option)
            with suppress(*_FAILURES):
                if any(part.text for _, part in self._deliveries(request)):
                    continue
            self.accepted.discard(option)
        self.differences |= {k: how for k, how in ASPECTS.items() if k not in self.accepted}


def open_served(name: str, url: str, clients: int, llm: LLM) -> ServedEngine:
    """The engine for the server at ``url``. A ``#MODEL`` at its end names the model, by default the
    first that the server lists. Raises BaselineFailedError, and ConfigError if it is no URL."""
    base, _, model = url.partition("#")
    client = OpenAIClient.at(base, timeout=_TIMEOUT)
    try:
        names = [model] if model else [str(item["id"]) for item in client.models()]
        if not names:
            raise ServerFailedError("it lists no model: name one, as in URL#MODEL")
        client = replace(client, fields={"model": names[0]})
        engine = ServedEngine(name, client, clients, llm)
        engine.probe_options()
    except _FAILURES as error:
        raise BaselineFailedError(
            f"no server of OpenAI's /v1/completions answers at {url} ({error}); start it first"
        ) from None
    return engine


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Integers in the proportion of ``weights`` that sum to ``total``."""
    ends = [total * part // sum(weights) for part in accumulate(weights)]
    return [end - begin for begin, end in pairwise([0, *ends])]
