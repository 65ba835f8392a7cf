"""Certifies a server by its answers: a little of every part with each prompt, until time is up."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from paceline.lab.certify.asking import (
    BINS,
    TIE,
    TOP,
    AnswerChoice,
    Asking,
    EffortSpentError,
    Part,
    counted,
    name_of,
    parting,
)
from paceline.lab.certify.certificate import (
    TESTS,
    Certificate,
    DistributionTest,
    Problem,
    ResultTable,
    as_family,
    too_little,
)
from paceline.lab.certify.decoding import first_difference
from paceline.lab.openai_client import RequestRefusedError, ServerFailedError, ServerTimeoutError
from paceline.lab.report.document import Column

_FAILURES = 3  # of a part, after which it is left
_PARTS = ResultTable(
    "parts",
    "Parts",
    (
        Column("part", "part", "name"),
        *(Column(name, name) for name in ("requests", "checked")),
        Column("unit", "of"),
        Column("ties", "ties"),
        Column("problems", "problems", shown=len),
        Column("notes"),
        Column("seconds", "seconds", shown="{:.1f}".format),
    ),
)
_FEW = 10  # tokens, of which some are not certain
_RESCORED = 3  # positions of each text
_SAMPLES, _DEPTH = 16, 4  # of a request, and tokens of each: the first is hardly ever drafted
# Sampling from the whole distribution, many texts at once. Some servers cut it unless they are
# told not to, some know no such fields, and some give one text at a time.
_WHOLE: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}
_UNCUT: dict[str, float] = {**_WHOLE, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_SAMPLING = tuple({**fields, "n": n} for fields in (_UNCUT, _WHOLE) for n in (_SAMPLES, 1))
_PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}


def check_greedy(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """Greedy texts are those of the reference, and made of the likeliest tokens."""
    greedy = asking.greedy(prompt)
    part.checked += 1
    if greedy.text and not greedy.tokens:
        part.note("the server gives no logprobs: texts are compared letter by letter")
    for at, token in enumerate(greedy.tokens):
        gap = token.logprob - max(token.likeliest.values(), default=token.logprob)
        if gap < -TIE:
            other = f"another is {-gap:.2f} nats likelier by the server's own word"
            yield f"token {at} is {token.text!r}, {other}"
            break
    if asking.reference is None:
        compared = "give --against, or a server that can switch speculation off"
        part.note(f"nothing to compare with: {compared}")
    else:
        yield from part.compare(greedy, asking.complete(asking.reference, prompt)[0])


def check_streams(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """A stream says what the whole answer says, and brings as many tokens as it counts."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": asking.max_tokens, "logprobs": 1}
    whole, usage = asking.greedy(prompt), {"stream_options": {"include_usage": True}}
    chunks = list(asking.stream("completions", {**body, **usage}))
    deltas = [AnswerChoice.of(choice) for chunk in chunks for choice in chunk.get("choices") or ()]
    reasons = [delta.reason for delta in deltas if delta.reason is not None]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    text = "".join(delta.text for delta in deltas)
    streamed = AnswerChoice(text, None, tokens)
    part.checked += 1
    counts = [n for chunk in chunks if (n := counted(chunk, "completion")) is not None]
    if len(reasons) != 1:
        yield f"{len(reasons)} chunks with a finish_reason, not one"
    unsaid = reasons[-1:] == ["stop"]  # some count the end token, which is in no text
    if tokens and counts and not 0 <= counts[-1] - len(tokens) <= unsaid:
        yield f"{counts[-1]} tokens are counted, the stream brought {len(tokens)}"
    elif "".join(whole.spelt) == whole.text and "".join(streamed.spelt) not in ("", text):
        yield "the tokens of the stream do not make its text"
    elif text != whole.text:
        again = asking.complete(asking.server, prompt)[0]
        _, tie = parting(streamed, whole)
        part.ties += tie
        if not tie and again.text == whole.text:
            at = first_difference(text, whole.text)
            yield f"stream and whole answer part at character {at}"


def check_logprobs(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """Logprobs are chances, and those of the same position read as a prompt."""
    greedy = asking.greedy(prompt)
    if not greedy.tokens:
        if greedy.text:  # an answer may end at once
            part.note("the server gives no logprobs: nothing was re-scored")
        return
    if len(greedy.tokens) >= _FEW and not any(token.logprob for token in greedy.tokens):
        yield "all logprobs are 0.0"
    tops = [list(token.likeliest.values()) for token in greedy.tokens]
    if any(sum(map(math.exp, top)) > 1.01 or max(top, default=0) > 1e-6 for top in tops):
        yield "chances that sum to more than 1"
    bare = tops.count([])
    if 0 < bare < len(tops):
        yield f"{bare} of {len(tops)} tokens have no alternatives"
    cut = [at for at, t in enumerate(greedy.spelt) if "\ufffd" in t or t.startswith("bytes:")]
    positions = range(1, min([len(tops), *cut]))
    for at in asking.chance.sample(positions, min(_RESCORED, len(positions))):
        text = prompt + "".join(greedy.spelt[:at])
        again = asking.complete(asking.server, text, max_tokens=1)[0]
        recut = again.read and greedy.read and again.read != greedy.read + at
        listed = again.tokens[0].likeliest if again.tokens else {}
        if recut or not listed:
            continue  # the text is cut into other tokens there, or nothing is known of it
        part.checked += 1
        token, claimed, _ = greedy.tokens[at]
        logprob = listed.get(token, min(listed.values()))
        below = max(listed.values()) - logprob
        if below > TIE:
            yield f"token {at}, {token!r}: {below:.2f} nats from the likeliest, re-scored"
        elif claimed - logprob > TIE or (token in listed and logprob - claimed > TIE):
            yield f"token {at}, {token!r}: logprob {claimed:.3f}, re-scored {logprob:.3f}"


def check_samples(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """Sampled tokens follow the chances that the server names: what is drawn here is tested."""
    drawn: list[AnswerChoice] = []
    while len(drawn) < _SAMPLES:
        drawn += asking.complete(asking.server, prompt, _SAMPLING, max_tokens=_DEPTH)
    part.checked += len(drawn)
    for token, _, top in (token for choice in drawn for token in choice.tokens):
        # Uniform, if it was drawn with the chances that are named.
        listed = sorted(top.items(), key=lambda item: -item[1])[:TOP]
        names, chances = [other for other, _ in listed], [math.exp(value) for _, value in listed]
        rank = names.index(token) if token in names else len(names)
        chances.append(max(0.0, 1.0 - sum(chances)))
        position = sum(chances[:rank]) + asking.chance.random() * chances[rank]
        asking.bins[min(BINS - 1, int(position * BINS))] += 1
    yield from ()


def check_limits(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """Stop strings, token limits and penalties."""
    server, text = asking.server, asking.greedy(prompt).text
    part.checked += 1
    words = text.split()
    stop = words[len(words) // 2] if len(words) > 2 else ""
    if stop and stop not in prompt:
        stopped = asking.complete(server, prompt, stop=[stop])[0].text
        if stop in stopped:
            yield f"the text holds its stop string {stop!r}"
        elif text.startswith(stopped) and stopped != text.partition(stop)[0]:
            yield f"stop string {stop!r} ends the text elsewhere"
    written = asking.complete(server, prompt, max_tokens=3)[0].written
    if written is not None and written > 3:
        yield f"{written} tokens where max_tokens is 3"
    if asking.reference is not None:
        pair = server, asking.reference
        ours, theirs = (asking.complete(s, prompt, [_PENALTIES])[0] for s in pair)
        for divergence in part.compare(ours, theirs, _PENALTIES):
            yield f"with penalties: {divergence}"


_KINDS = {"name": str, "count": int}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
        }
    },
    "tool call": {
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": _SCHEMA}}],
        "tool_choice": "required",  # of the one that there is; more servers know it than its name
    },
}


def check_structure(asking: Asking, part: Part, prompt: str) -> Iterator[str]:
    """Answers under a schema, whole and streamed, are of its form; so are a tool's arguments."""
    form = list(_FORMS)[part.rounds % len(_FORMS)]
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, **_FORMS[form]}
    path = "chat/completions"
    try:
        whole = _content([asking.counting().answer(path, body)], "message")
        streamed = _content(asking.stream(path, body), "delta")
    except RequestRefusedError as error:
        part.note(f"{form} was not checked: the server says {error}")
        return
    for how, (text, reason) in (("", whole), (", streamed", streamed)):
        part.checked += 1
        if reason != "length" and not _of_schema(text):  # some are cut off before their end
            yield f"{form}{how}: not of the schema: {text[:60]!r}"
    if whole[0] != streamed[0]:
        again = _content([asking.counting().answer(path, body)], "message")
        if again[0] == whole[0]:
            yield f"{form}: stream and whole answer differ"


def _content(chunks: Iterable[Mapping[str, Any]], key: str) -> tuple[str, str | None]:
    """Content, or the arguments of the first tool call, and how the answer ended."""
    text, reason = "", None
    for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
        message = choice.get(key) or {}
        reason = choice.get("finish_reason") or reason
        calls = message.get("tool_calls") or ()
        text += message.get("content") or ""
        text += "".join((call.get("function") or {}).get("arguments") or "" for call in calls[:1])
    return text, reason


def _of_schema(text: str) -> bool:
    try:
        parsed = json.loads(text)
    except ValueError:
        return False
    kinds = {key: type(value) for key, value in parsed.items()} if type(parsed) is dict else {}
    return kinds == _KINDS and len(parsed["name"]) <= 12


# In the order in which each prompt goes through them: what one checks, its unit, how.
PARTS = (
    ("greedy", "texts", check_greedy),
    ("streams", "streams", check_streams),
    ("logprobs", "positions", check_logprobs),
    ("sampling", "samples", check_samples),
    ("limits", "texts", check_limits),
    ("structure", "answers", check_structure),
)


def lacks_of(parts: Sequence[Part], tests: Sequence[DistributionTest]) -> list[str]:
    """What must have been checked, or nothing is certified."""
    greedy, *others, _ = parts
    lacks = [f"no {part.unit} for {part.name}" for part in others if not part.checked]
    lacks += [f"{p.name}: {p.timeouts} without an answer in time" for p in parts if p.timeouts]
    bias = min((test.smallest_bias for test in tests), default=1.0)
    return lacks + too_little(greedy.checked, bias)


class ServerCertifier(Asking):
    """One certification of a server; ``certificate`` may be asked for at any time."""

    _ended = False

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(*part) for part in PARTS)

    @property
    def pieces(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        return len(self.prompts) * len(self.parts) + self.effort.requests

    def run(self, advance: Callable[[str], None] = lambda what: None) -> None:
        """Every part with one prompt after the other; then samples, as long as there may be more.
        KeyboardInterrupt passes through."""
        try:
            for (name, prompt), part in self._rounds():
                if self.budget.left <= 0:
                    break
                if part.failures < _FAILURES:
                    advance(f"{part.name}: {name}")
                    self._check(part, name, prompt)
        except EffortSpentError:
            pass
        self._ended = True

    def _rounds(self) -> Iterator[tuple[tuple[str, str], Part]]:
        yield from itertools.product(self.prompts, self.parts)
        sampling = [part for part in self.parts if part.check is check_samples]
        while sampling[0].failures < _FAILURES:
            yield from itertools.product(self.prompts, sampling)

    def _check(self, part: Part, name: str, prompt: str) -> None:
        sent, start = self.sent, time.monotonic()
        try:
            for problem in part.check(self, part, prompt):
                part.problems.append(f"{name}: {problem}")
        except RequestRefusedError as error:
            part.failures += 1
            part.note(f"the server refuses: {error}")
        except ServerTimeoutError:
            if self.budget.left <= 0:
                raise EffortSpentError from None
            part.failures += 1
            part.timeouts += 1
        except ServerFailedError as error:
            part.failures += 1
            part.problems.append(f"{name}: {error}")
        finally:
            part.rounds += 1
            part.requests += self.sent - sent
            part.seconds += time.monotonic() - start

    def certificate(self) -> Certificate:
        """The verdict on what was seen so far."""
        parts, alpha, spent = self.parts, self.effort.alpha, self.budget.spent
        reference, tests = self.reference, as_family(self.tests(), alpha)
        problems = [Problem(part.name, what) for part in parts for what in part.problems]
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        sees = max((test.smallest_bias for test in tests), default=1.0)
        return Certificate(
            title=f"Is {name_of(self.server)} lossless?",
            alpha=alpha,
            facts={
                "server": name_of(self.server),
                "reference": None if reference is None else name_of(reference),
                "seconds": spent,
            },
            tables=(replace(_PARTS, rows=parts), replace(TESTS, rows=tests)),
            problems=tuple(problems),
            lacks=tuple(lacks_of(parts, tests)),
            notes=tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
            interrupted=not self._ended,
            completed=f"{spent:.0f} s, {self.sent} requests",
            certified=f"nothing is wrong in {self.sent} requests; no bias in {len(tests)} "
            f"distribution tests, which see {sees:.1%}",
        )
