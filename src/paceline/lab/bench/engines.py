"""Methods of a comparison (``plain``, drafters with a length such as ``ngram@5``) and the engines
that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.drafters import DRAFTERS, parse_draft
from paceline.engine.driver import Drive, StepTotals, sequence
from paceline.errors import ConfigError
from paceline.lab.bench.runner import (
    BenchEngine,
    BenchRequest,
    Length,
    Method,
    TimedAnswer,
    TimedRun,
)
from paceline.llm import LLM

PLAIN = "plain"
_MAX_LENGTH = 64


def parse_method(text: str, draft: str | None, length: Length = "auto") -> Method:
    """Parse a draft spec, optionally with ``@LENGTH``; the default is ``length``. ``draft``: the
    spec that the word "draft" stands for. Raises ConfigError."""
    text = text.strip()
    body, named_length = _split(text)
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
            raise ConfigError(f"method {text!r} is not {PLAIN} or draft, and {error}") from None
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

    def create(self, method: Method, clients: int, **options: Any) -> Paceline:
        """An engine for ``clients`` concurrent requests. ``options`` override the common ones.
        Raises what loading a drafter raises."""
        length = method.length if method.draft is not None else 0
        merged = {"draft_length": length, "max_batch_size": clients, **self._options, **options}
        return Paceline(method, partial(self._llm.with_draft, method.draft, **merged), clients)
