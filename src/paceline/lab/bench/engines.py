"""Methods: ``plain``, drafters with a length (``ngram@5``), servers (``url:http://A:1``); and the
engines that answer by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.params import SamplingParams
from paceline.drafters import DRAFTERS
from paceline.engine.driver import DraftCounts, Drive, StepSums, sequence
from paceline.errors import ConfigError, PacelineError
from paceline.lab.bench.runner import Ask, BenchEngine, Length, Method, TimedAnswer, TimedRun
from paceline.lab.openai_client import OpenAIClient, RequestRefusedError, ServerFailedError
from paceline.llm import LLM

PLAIN = "plain"
_LONGEST = 64


def parse_method(text: str, draft: str | None, length: Length = "auto") -> Method:
    """One spec, perhaps with ``@LENGTH``, else of this ``length``. ``draft``: what "draft" stands
    for. Raises ConfigError."""
    text = text.strip()
    body, named_length = _split(text)
    head, _, address = text.partition(":")
    if head == "url":
        if not address:
            raise ConfigError(f"method {text!r} needs its address: url:http://HOST:PORT")
        return Method(text, None, None, address)
    if body in (PLAIN, "none"):
        if named_length is not None:
            raise ConfigError(f"method {text!r}: plain decoding drafts nothing; leave out the @")
        return Method(PLAIN, length=0)
    if body == "draft":
        if draft is None:
            raise ConfigError(f"method {text!r}: no draft is named; add --draft, or name it here")
        body = draft
    elif not (
        body.partition(":")[0] in DRAFTERS or "/" in body or Path(body).expanduser().is_dir()
    ):
        kinds = ", ".join(sorted(set(DRAFTERS) - {"none"}))
        raise ConfigError(
            f"there is no method {text!r}; there are {PLAIN}, draft (what --draft names), "
            f"url:http://HOST:PORT, {kinds}, or a draft model's folder"
        )
    return Method(text, body, length if named_length is None else named_length)


def parse_methods(
    texts: Sequence[str], draft: str | None, length: Length | tuple[int, ...] = "auto"
) -> list[Method]:
    """All methods, plain first; drafters without a length at this or each of these. ConfigError."""
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
    """A path may contain @, but does not end in @NUMBER."""
    body, at, tail = text.rpartition("@")
    if not at or not (tail == "auto" or tail.lstrip("-").isdecimal() or body in DRAFTERS):
        return text, None
    if tail != "auto" and not (tail.isdecimal() and 1 <= int(tail) <= _LONGEST):
        raise ConfigError(f"method {text!r}: draft lengths go from 1 to {_LONGEST}, or auto")
    return body, "auto" if tail == "auto" else int(tail)


class Paceline(BenchEngine):
    """Our engine and ``clients`` (see Drive). ``build`` gives the LLM, anew at every ``refresh`` if
    its drafter learns from requests."""

    def __init__(self, method: Method, build: Callable[[], LLM], clients: int) -> None:
        self.name, self.method = method.name, method
        self.llm = build()
        self._build = build if method.remembers else None
        self._clients = clients

    def refresh(self) -> None:
        if self._build is not None:
            self.llm = self._build()

    def close(self) -> None:
        self.llm.close()

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Raises PacelineError if a request fails or does not fit into the cache."""
        seqs = []
        for ask in asks:
            ends = frozenset[int]() if ask.params.ignore_eos else self.llm.end_tokens
            seqs.append(sequence(ask.prompt, ask.params, ends | {*ask.params.stop_token_ids}))
        drive = Drive(self.llm.engine, seqs, self._clients).run()
        answers = [
            TimedAnswer(
                tuple(seq.tokens[seq.prompt_length :]),
                tuple((moment - seq.queued, count) for moment, count in seq.arrivals),
            )
            for seq in drive.seqs
        ]
        decoding = StepSums.of(step for step in drive.steps if step.decodes)
        return TimedRun(answers, drive.seconds, drive.counts, decoding)


class Starter:
    """Engines around one loaded target, without a prefix cache; ``options``: ``LLM.beside``'s."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self._llm = llm
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        self.unequal: dict[str, dict[str, str]] = {}  # of other engines, by method

    def open(self, method: Method, clients: int, **options: Any) -> BenchEngine:
        """``options`` replace those of all. Raises what loading a drafter or asking another engine
        raises."""
        if method.url is not None:
            served = open_served(method.name, method.url, clients, self._llm)
            # What was seen of it at other numbers of clients still counts.
            served.different = self.unequal.setdefault(method.name, served.different)
            return served
        length = method.length if method.draft is not None else 0
        how = {"draft_length": length, "max_batch_size": clients, **self._options, **options}
        build = partial(self._llm.beside, method.draft, **how)
        return Paceline(method, build, clients)


EQUAL = "equal"
# In what its runs may differ from ours; and how, where that wish is refused.
ASPECTS = {
    "ids": "prompts sent as text, which its own tokenizer reads",
    "ignore_eos": "refused: it ends answers where the model does",
}
_TIMEOUT = 600.0  # seconds between two deliveries: a long prompt on a slow machine
# What is asked for if the server takes it: prompts as ids, no end, ids and counts in the answer,
# no cache of prompts (llama.cpp) and none of the sampling that a server may have by default.
_WISHES: dict[str, dict[str, Any]] = {
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
    """Another engine did not answer, or not as the target can."""


_WRONG = (ValueError, LookupError, TypeError, AttributeError)  # of an answer's content
_FAILURES = (RequestRefusedError, ServerFailedError, *_WRONG)


class Delivery(NamedTuple):
    """One event of a stream. ``ids`` where the server says them; ``written`` and ``read``: its
    counts of the answer's and the prompt's tokens, at the end."""

    moment: float
    text: str
    ids: tuple[int, ...]
    written: int | None
    read: int | None


@dataclass
class ServedEngine(BenchEngine):
    """A server, held against the tokenizer and vocabulary of ``llm``. ``takes``: the wishes that it
    does not refuse. ``different``: what of its runs was not as ours were, in words, by aspect."""

    name: str
    client: OpenAIClient
    clients: int
    llm: LLM
    takes: set[str] = field(default_factory=set)
    different: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ASPECTS, EQUAL))
    _answers: int = 0
    _short: int = 0

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """A delivery counts as one target step. Raises BaselineFailedError."""
        start = time.perf_counter()
        try:
            with ThreadPoolExecutor(self.clients) as pool:
                all_answers = list(pool.map(self._deliveries, asks))
        except _FAILURES as error:
            raise BaselineFailedError(
                f"{self.name} did not answer ({type(error).__name__}: {error}); look at its log"
            ) from None
        seconds = time.perf_counter() - start
        answers = [self._answer(*pair) for pair in zip(asks, all_answers, strict=True)]
        steps = sum(len(answer.arrivals) for answer in answers)
        accepted = sum(answer.count for answer in answers) - steps
        counts = DraftCounts(target_steps=steps, accepted=accepted)
        return TimedRun(answers, seconds, counts, tells_drafted=False)

    def _deliveries(self, ask: Ask) -> list[Delivery]:
        params, ids, outcomes = ask.params, list(ask.prompt), list[Delivery]()
        body: dict[str, Any] = {
            "prompt": ids if "ids" in self.takes else str(self.llm.tokenizer.decode(ids)),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        for wish in self.takes - (set() if params.ignore_eos else {"ignore_eos"}):
            body |= _WISHES[wish]
        start = time.perf_counter()
        for event in self.client.stream("completions", body):
            usage = event.get("usage") or {}
            (choice, *_) = event.get("choices") or [{}]
            new = tuple(int(token) for token in choice.get("token_ids") or ())
            counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
            text = str(choice.get("text") or "")
            outcomes.append(Delivery(time.perf_counter() - start, text, new, *counts))
        return outcomes

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _answer(self, ask: Ask, deliveries: Sequence[Delivery]) -> TimedAnswer:
        parts, vocabulary = [d for d in deliveries if d.text or d.ids], self.llm.target.vocab_size
        token_ids = tuple(token for one in parts for token in one.ids)
        tokens = token_ids or self._ids_of("".join(one.text for one in parts))
        written = [one.written for one in deliveries if one.written is not None] or [len(tokens)]
        count = len(token_ids) or written[-1]
        if not parts or not count:
            raise BaselineFailedError(f"{self.name} answered without a token; look at its log")
        if max(tokens, default=0) >= vocabulary:
            raise BaselineFailedError(
                f"{self.name} wrote the id {max(tokens)}, but the target has {vocabulary}: it runs "
                "another model; serve a form of the target"
            )
        weights = [len(one.ids) if token_ids else 1 for one in parts]
        if not token_ids and count != len(parts):
            weights = [max(1, len(self._ids_of(one.text))) for one in parts]
        dealt = zip(parts, shares(count, weights), strict=True)
        self._compare(ask, count, [one.read for one in deliveries if one.read is not None])
        return TimedAnswer(tokens, tuple((one.moment, n) for one, n in dealt if n), count)

    def _compare(self, ask: Ask, count: int, read: Sequence[int]) -> None:
        """Note what was not equal in an answer of ``count`` tokens."""
        self._answers += 1
        if read and read[-1] != len(ask.prompt):
            self.different["ids"] = f"read {read[-1]} tokens where the prompt has {len(ask.prompt)}"
        if ask.params.ignore_eos and count < ask.params.max_tokens:
            self._short += 1
            self.different["ignore_eos"] = f"{self._short} of {self._answers} answers ended early"

    def find_out(self) -> None:
        """A short request without any wish, which must succeed, then one with each. Raises what a
        failed request raises."""
        ask = Ask(self._ids_of("Hello there"), SamplingParams(max_tokens=2, ignore_eos=True))
        self._deliveries(ask)
        for wish in _WISHES:
            self.takes.add(wish)
            with suppress(*_FAILURES):
                if any(one.text for one in self._deliveries(ask)):
                    continue
            self.takes.discard(wish)
        self.different |= {name: why for name, why in ASPECTS.items() if name not in self.takes}


def open_served(name: str, url: str, clients: int, llm: LLM) -> ServedEngine:
    """The server at ``url``, and #MODEL or the first that it lists. Raises BaselineFailedError,
    and ConfigError for what is no URL."""
    base, _, model = url.partition("#")
    client = OpenAIClient.at(base, timeout=_TIMEOUT)
    try:
        client = replace(client, fields={"model": model or str(client.models()[0]["id"])})
        engine = ServedEngine(name, client, clients, llm)
        engine.find_out()
    except RequestRefusedError as error:
        raise BaselineFailedError(
            f"the server at {url} refuses completions ({error}); bench needs /v1/completions"
        ) from None
    except _FAILURES as error:
        what = "" if isinstance(error, ServerFailedError) else f"{type(error).__name__}: "
        raise BaselineFailedError(
            f"no server of OpenAI's protocol answers at {url} ({what}{error}); start it first"
        ) from None
    return engine


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` dealt out over deliveries in the proportion of ``weights``, exactly."""
    whole = sum(weights)
    ends = [total * weight // whole if whole else total for weight in accumulate(weights)]
    return [end - begin for begin, end in pairwise([0, *ends])]
