"""Certifies a server by its answers: runs every check with each prompt, until the budget ends."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.lab.certify.certificate import (
    TESTS,
    Certificate,
    DistributionTest,
    Problem,
    ResultTable,
    missing_evidence,
    with_holm_correction,
)
from paceline.lab.certify.decoding import first_difference
from paceline.lab.certify.session import (
    BINS,
    TIE,
    TOP_LOGPROBS,
    EffortSpentError,
    Part,
    ServerSession,
    name_of,
)
from paceline.lab.openai_client import (
    AnswerChoice,
    RequestRefusedError,
    ServerFailedError,
    ServerTimeoutError,
    choices_of,
)
from paceline.lab.report.document import Column

_MAX_FAILURES = 3  # requests of a part that may fail before the part is given up
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
_MIN_UNCERTAIN = 10  # tokens of a text of which at least one has a probability below 1
_RESCORED = 3  # positions per text
_SAMPLES = 16  # per request
_SAMPLE_TOKENS = 4  # more than one, because the first token is hardly ever drafted
# Sampling from the whole distribution, several texts per request. Some servers truncate by default,
# some refuse these fields, and some allow one text per request.
_TEMPERATURE: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}
_UNTRUNCATED = {**_TEMPERATURE, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_SAMPLING = tuple(
    {**fields, "n": n} for fields in (_UNTRUNCATED, _TEMPERATURE) for n in (_SAMPLES, 1)
)
_PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}


def check_greedy(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """Greedy texts equal the reference's, and consist of the likeliest tokens."""
    greedy = session.greedy(prompt)
    part.checked += 1
    if greedy.text and not greedy.tokens:
        part.note("the server gives no logprobs: texts are compared character by character")
    for at, token in enumerate(greedy.tokens):
        gap = token.logprob - max(token.likeliest.values(), default=token.logprob)
        if gap < -TIE:
            other = f"another is {-gap:.2f} nats likelier by the server's own logprobs"
            yield f"token {at} is {token.text!r}, {other}"
            break
    if session.reference is None:
        hint = "give --against, or a server that can switch speculation off"
        part.note(f"there is no reference to compare with: {hint}")
    else:
        yield from part.compare(greedy, session.complete(session.reference, prompt)[0])


def check_streams(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """A stream has the text of the whole answer, and as many tokens as its usage counts."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": session.max_tokens, "logprobs": 1}
    whole, usage = session.greedy(prompt), {"stream_options": {"include_usage": True}}
    chunks = list(session.stream("completions", {**body, **usage}))
    deltas = [delta for chunk in chunks for delta in choices_of(chunk, streamed=True)]
    reasons = [delta.reason for delta in deltas if delta.reason is not None]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    text = "".join(delta.text for delta in deltas)
    streamed = AnswerChoice(text, None, tokens)
    spelled = "".join(streamed.token_texts)
    part.checked += 1
    counts = [n for delta in deltas if (n := delta.completion_tokens) is not None]
    if len(reasons) != 1:
        yield f"{len(reasons)} chunks with a finish_reason, not one"
    uncertain = reasons[-1:] == ["stop"]  # some servers count the end token, which has no text
    if tokens and counts and not 0 <= counts[-1] - len(tokens) <= uncertain:
        yield f"the usage counts {counts[-1]} tokens, the stream has {len(tokens)}"
    elif "".join(whole.token_texts) == whole.text and spelled not in ("", text):
        yield "the tokens of the stream do not make up its text"
    elif text != whole.text:
        again = session.complete(session.server, prompt)[0]
        if [*part.compare(streamed, whole)] and again.text == whole.text:
            at = first_difference(text, whole.text)
            yield f"stream and whole answer differ from character {at} on"


def check_logprobs(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """Logprobs are those of probabilities, and the same if the text before them is the prompt."""
    greedy = session.greedy(prompt)
    if not greedy.tokens:
        if greedy.text:  # an empty answer has none
            part.note("the server gives no logprobs: nothing was re-scored")
        return
    if len(greedy.tokens) >= _MIN_UNCERTAIN and not any(t.logprob for t in greedy.tokens):
        yield "all logprobs are 0.0"
    tops = [list(token.likeliest.values()) for token in greedy.tokens]
    if any(sum(map(math.exp, top)) > 1.01 or max(top, default=0) > 1e-6 for top in tops):
        yield "the probabilities of a position sum to more than 1"
    without = tops.count([])
    if 0 < without < len(tops):
        yield f"{without} of {len(tops)} tokens have no alternatives"
    # Tokens with an incomplete character cannot be sent back as text.
    incomplete = (
        at for at, t in enumerate(greedy.token_texts) if "\ufffd" in t or t.startswith("bytes:")
    )
    positions = range(1, min([len(tops), *incomplete]))
    for at in session.random.sample(positions, min(_RESCORED, len(positions))):
        text = prompt + "".join(greedy.token_texts[:at])
        again = session.complete(session.server, text, max_tokens=1)[0]
        counts = again.prompt_tokens, greedy.prompt_tokens
        retokenized = counts[0] and counts[1] and counts[0] != counts[1] + at
        listed = again.tokens[0].likeliest if again.tokens else {}
        if retokenized or not listed:
            continue  # the same text has other tokens as a prompt, or there are no logprobs
        part.checked += 1
        token, claimed, _ = greedy.tokens[at]
        logprob = listed.get(token, min(listed.values()))
        below = max(listed.values()) - logprob
        if below > TIE:
            yield f"token {at}, {token!r}: {below:.2f} nats from the likeliest, re-scored"
        elif claimed - logprob > TIE or (token in listed and logprob - claimed > TIE):
            yield f"token {at}, {token!r}: logprob {claimed:.3f}, re-scored {logprob:.3f}"


def check_samples(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """Sampled tokens follow the probabilities that the server reports. Only fills
    ``session.bins``; ``ServerSession.tests`` tests them."""
    samples: list[AnswerChoice] = []
    while len(samples) < _SAMPLES:
        samples += session.complete(session.server, prompt, _SAMPLING, max_tokens=_SAMPLE_TOKENS)
    part.checked += len(samples)
    for token, _, top in (token for choice in samples for token in choice.tokens):
        # The randomized rank is uniform if the token was drawn with the reported probabilities.
        listed = sorted(top.items(), key=lambda item: -item[1])[:TOP_LOGPROBS]
        names, probs = [other for other, _ in listed], [math.exp(value) for _, value in listed]
        index = names.index(token) if token in names else len(names)
        probs.append(max(0.0, 1.0 - sum(probs)))
        rank = sum(probs[:index]) + session.random.random() * probs[index]
        session.bins[min(BINS - 1, int(rank * BINS))] += 1
    yield from ()


def check_limits(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """Stop strings, token limits and penalties are respected."""
    server, text = session.server, session.greedy(prompt).text
    part.checked += 1
    words = text.split()
    stop = words[len(words) // 2] if len(words) > 2 else ""
    if stop and stop not in prompt:
        stopped = session.complete(server, prompt, stop=[stop])[0].text
        if stop in stopped:
            yield f"the text contains its stop string {stop!r}"
        elif text.startswith(stopped) and stopped != text.partition(stop)[0]:
            yield f"stop string {stop!r} ends the text at another position"
    tokens = session.complete(server, prompt, max_tokens=3)[0].completion_tokens
    if tokens is not None and tokens > 3:
        yield f"{tokens} tokens where max_tokens is 3"
    if session.reference is not None:
        pair = server, session.reference
        answer, expected = (session.complete(s, prompt, [_PENALTIES])[0] for s in pair)
        for divergence in part.compare(answer, expected, _PENALTIES):
            yield f"with penalties: {divergence}"


_SCHEMA_TYPES = {"name": str, "count": int}
_FORMS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("forms.json").read_text(encoding="utf-8")
)


def check_structure(session: ServerSession, part: Part, prompt: str) -> Iterator[str]:
    """Answers and tool arguments match the JSON schema of ``forms.json``, whole and streamed. There
    is one tool, and a call is "required": more servers support this than naming the tool."""
    form = list(_FORMS)[part.rounds % len(_FORMS)]
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, **_FORMS[form]}
    path = "chat/completions"
    try:
        whole = _content([session.next_client().answer(path, body)], "message")
        streamed = _content(session.stream(path, body), "delta")
    except RequestRefusedError as error:
        part.note(f"{form} was not checked: the server says {error}")
        return
    for how, (text, reason) in (("", whole), (", streamed", streamed)):
        part.checked += 1
        if reason != "length" and not _matches_schema(text):  # max_tokens may cut an answer
            yield f"{form}{how}: the answer does not match the schema: {text[:60]!r}"
    if whole[0] != streamed[0]:
        again = _content([session.next_client().answer(path, body)], "message")
        if again[0] == whole[0]:
            yield f"{form}: stream and whole answer differ"


def _content(chunks: Iterable[Mapping[str, Any]], key: str) -> tuple[str, str | None]:
    """The content or the arguments of the first tool call, and the finish reason."""
    text, reason = "", None
    for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
        message = choice.get(key) or {}
        reason = choice.get("finish_reason") or reason
        calls = message.get("tool_calls") or ()
        text += message.get("content") or ""
        text += "".join((call.get("function") or {}).get("arguments") or "" for call in calls[:1])
    return text, reason


def _matches_schema(text: str) -> bool:
    try:
        parsed = json.loads(text)
    except ValueError:
        return False
    types = {key: type(value) for key, value in parsed.items()} if type(parsed) is dict else {}
    return types == _SCHEMA_TYPES and len(parsed["name"]) <= 12


# Name, unit and check of each part, in the order in which a prompt goes through them.
PARTS = (
    ("greedy", "texts", check_greedy),
    ("streams", "streams", check_streams),
    ("logprobs", "positions", check_logprobs),
    ("sampling", "samples", check_samples),
    ("limits", "texts", check_limits),
    ("structure", "answers", check_structure),
)


def lacks_of(parts: Sequence[Part], tests: Sequence[DistributionTest]) -> list[str]:
    greedy, *others, _ = parts
    lacks = [f"no {part.unit} for {part.name}" for part in others if not part.checked]
    lacks += [f"{p.name}: {p.timeouts} without an answer in time" for p in parts if p.timeouts]
    bias = min((test.smallest_bias for test in tests), default=1.0)
    return lacks + missing_evidence(greedy.checked, bias)


class ServerCertifier(ServerSession):
    """One certification of a server. ``certificate`` can be called at any time."""

    _ended = False

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(*part) for part in PARTS)

    @property
    def num_tasks(self) -> int:
        """How often ``run`` calls ``advance`` at most."""
        return len(self.prompts) * len(self.parts) + self.effort.requests

    def run(self, advance: Callable[[str], None] = lambda description: None) -> None:
        """Run every part with each prompt, then draw samples, up to effort and budget or Ctrl-C."""
        try:
            for (name, prompt), part in self._checks():
                if self.budget.left <= 0:
                    break
                if part.failures < _MAX_FAILURES:
                    advance(f"{part.name}: {name}")
                    self._check(part, name, prompt)
        except EffortSpentError:
            pass
        self._ended = True

    def _checks(self) -> Iterator[tuple[tuple[str, str], Part]]:
        yield from itertools.product(self.prompts, self.parts)
        sampling = [part for part in self.parts if part.check is check_samples]
        while sampling[0].failures < _MAX_FAILURES:
            yield from itertools.product(self.prompts, sampling)

    def _check(self, part: Part, name: str, prompt: str) -> None:
        sent, start = self.sent, time.monotonic()
        try:
            for problem in part.check(self, part, prompt):
                part.problems.append(f"{name}: {problem}")
        except RequestRefusedError as error:
            part.failures += 1
            part.note(f"the server refused: {error}")
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
        parts, alpha, spent = self.parts, self.effort.alpha, self.budget.spent
        reference, tests = self.reference, with_holm_correction(self.tests(), alpha)
        problems = [Problem(part.name, what) for part in parts for what in part.problems]
        problems += [test.problem() for test in tests if test.adjusted_p_value < alpha]
        bias = max((test.smallest_bias for test in tests), default=1.0)
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
            missing_evidence=tuple(lacks_of(parts, tests)),
            notes=tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
            interrupted=not self._ended,
            completed=f"{spent:.0f} s, {self.sent} requests",
            certified=f"no problem in {self.sent} requests; no bias in {len(tests)} distribution "
            f"tests, which detect {bias:.1%} or more",
        )
