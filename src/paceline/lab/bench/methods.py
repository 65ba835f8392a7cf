"""Methods: ``plain``, drafters with a length (``ngram@5``), servers (``url:http://A:1``); and the
engines that answer by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.drafters import DRAFTERS, parse_draft
from paceline.engine.driver import Drive, StepSums, sequence
from paceline.errors import ConfigError
from paceline.lab.bench.runs import Ask, BenchEngine, TimedAnswer, TimedRun
from paceline.lab.bench.served import open_served
from paceline.llm import LLM

PLAIN = "plain"
_LONGEST = 64

Length = int | Literal["auto"]


@dataclass(frozen=True)
class Method:
    """``draft``: a draft spec; None decodes plainly. ``url``: of another engine's server, whose
    ``length`` is None."""

    name: str
    draft: str | None = None
    length: Length | None = "auto"
    url: str | None = None

    @property
    def remembers(self) -> bool:
        """Whether earlier requests help it with later ones."""
        return any(member.remembers for member in parse_draft(self.draft).members())


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
    texts: Sequence[str],
    draft: str | None,
    length: Length = "auto",
    lengths: Sequence[int] = (),
) -> list[Method]:
    """All methods, plain decoding first. Drafters that name no length run at each of ``lengths``.
    Raises ConfigError."""
    methods = [Method(PLAIN, length=0)]
    for text in texts:
        method = parse_method(text, draft, length)
        if lengths and method.draft is not None and _split(text)[1] is None:
            methods += [replace(method, name=f"{method.name}@{n}", length=n) for n in lengths]
        else:
            methods.append(method)
    return list({method.name: method for method in methods}.values())


def _split(text: str) -> tuple[str, Length | None]:
    """A path may contain @, but does not end in @NUMBER."""
    body, at, tail = text.rpartition("@")
    if not at or not (tail == "auto" or tail.lstrip("-").isdecimal()):
        return text, None
    if tail != "auto" and not 1 <= int(tail) <= _LONGEST:
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
    """Makes engines around one loaded target, without a prefix cache. ``options`` as of
    ``LLM.beside``."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self._llm = llm
        self._options = {"seed": 0, "prefix_sharing": False, **options}
        self.unequal: dict[str, dict[str, str]] = {}  # of other engines, see served.py

    def open(self, method: Method, clients: int) -> BenchEngine:
        """Raises what loading a drafter or asking another engine raises."""
        if method.url is not None:
            served = open_served(method.name, method.url, clients, self._llm)
            # What was seen of it at other numbers of clients still counts.
            served.different = self.unequal.setdefault(method.name, served.different)
            return served
        length = method.length if method.draft is not None else 0
        sizes: dict[str, Any] = {"draft_length": length, "max_batch_size": clients}
        build = partial(self._llm.beside, method.draft, **sizes, **self._options)
        return Paceline(method, build, clients)
