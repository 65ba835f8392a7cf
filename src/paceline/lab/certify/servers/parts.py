"""The parts of a server's certification: texts, logprobs, samples, streams, structure, limits."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.lab.certify.chisquare import ChiSquare, goodness, homogeneity, joined
from paceline.lab.certify.servers.answers import Said, ServerRefusedError, tokens_of
from paceline.lab.certify.servers.asking import TIE, TOP, CheckPart, gap, parting
from paceline.lab.difference import first_difference

_RESCORED = 3  # places of each text
_SAMPLES, _DEPTH = 16, 4  # of a request, and tokens of each: the first is hardly ever drafted
_LETTERS = 12  # of a sample that are compared with the reference's
_BINS = 10
_FEW = 10  # samples of both in a cell of its own
# Sampling from the whole distribution. Some servers cut it unless they are told not to, and some
# know no such fields.
_WHOLE: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}
_UNCUT: dict[str, float] = {**_WHOLE, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5}


class GreedyPart(CheckPart):
    """Greedy texts are those of the reference, and made of the likeliest tokens."""

    name, unit = "greedy", "texts"

    def look(self, name: str, prompt: str) -> None:
        greedy, _ = self.asking.greedy(prompt)
        self.looked_at += 1
        if greedy.text and not greedy.tokens:
            self.note("the server gives no logprobs: texts are compared letter by letter")
        for at, (token, listed) in enumerate(zip(greedy.tokens, greedy.likeliest, strict=False)):
            least = min((gap(greedy, at, other) for other in listed), default=0.0)
            if least < -TIE:
                self.problems.append(
                    f"{name}: token {at} is {token!r}, another is {-least:.2f} nats likelier by "
                    "the server's own word"
                )
                break
        if self.asking.reference is None:
            self.note(
                "nothing to compare with: give --against, or a server that can switch "
                "speculation off"
            )
            return
        self.compare(name, greedy, self.asking.completion(self.asking.reference, prompt))


class LogprobPart(CheckPart):
    """Logprobs are chances, and those of the same place read as a prompt."""

    name, unit = "logprobs", "places"

    def look(self, name: str, prompt: str) -> None:
        asking = self.asking
        greedy, length = asking.greedy(prompt)
        if not greedy.logprobs:
            if greedy.text:  # an answer may end at once
                self.note("the server gives no logprobs: nothing was re-scored")
            return
        for top in greedy.likeliest:
            if sum(map(math.exp, top.values())) > 1.01 or max(top.values(), default=0) > 1e-6:
                self.problems.append(f"{name}: chances that sum to more than 1")
                break
        count, bare = len(greedy.likeliest), sum(not top for top in greedy.likeliest)
        if 0 < bare < count:
            self.problems.append(f"{name}: {bare} of {count} tokens have no alternatives")
        places = [at for at in range(1, len(greedy.tokens)) if _clean(greedy.tokens[: at + 1])]
        for at in asking.chance.sample(places, min(_RESCORED, len(places))):
            text = prompt + "".join(greedy.tokens[:at])
            (fresh, *_), answer = asking.completions(asking.server, text, max_tokens=1)
            read = tokens_of(answer, "prompt")
            recut = read is not None and length is not None and read != length + at
            if recut or not (fresh.likeliest and fresh.likeliest[0]):
                continue  # the text is cut into other tokens there, or nothing is said of it
            self.looked_at += 1
            self._compare(name, greedy, fresh, at)

    def _compare(self, name: str, answer: Said, fresh: Said, at: int) -> None:
        token, claimed, listed = answer.tokens[at], answer.logprobs[at], fresh.likeliest[0]
        known = listed.get(token)
        logprob = min(listed.values()) if known is None else known
        where = f"{name}: token {at}, {token!r}"
        if max(listed.values()) - logprob > TIE:
            self.problems.append(
                f"{where}: {max(listed.values()) - logprob:.2f} nats from the likeliest, re-scored"
            )
        elif claimed - logprob > TIE or (known is not None and logprob - claimed > TIE):
            self.problems.append(f"{where}: logprob {claimed:.3f}, re-scored {logprob:.3f}")

    def tests(self) -> list[tuple[str, int, ChiSquare]]:
        values, what = self.asking.values, "all logprobs are 0.0"
        if len(values) >= _FEW and not any(values) and what not in self.problems:
            self.problems.append(what)
        return []


@dataclass
class SamplePart(CheckPart):
    """Sampled tokens follow the chances that the server names, and texts those of the reference."""

    name, unit = "sampling", "samples"
    bins: list[int] = field(default_factory=lambda: [0] * _BINS)
    strings: dict[str, tuple[list[str], list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    # How many samples to ask for at once, and how; what is refused is not asked again.
    ways: list[tuple[int, dict[str, float]]] = field(
        default_factory=lambda: [(n, way) for way in (_UNCUT, _WHOLE) for n in (_SAMPLES, 1)]
    )

    def look(self, name: str, prompt: str) -> None:
        asking = self.asking
        for side, server in enumerate((asking.server, asking.reference)):
            if server is None:
                continue
            drawn: list[Said] = []
            while len(drawn) < _SAMPLES:
                together, way = self.ways[0]
                body = {**way, "max_tokens": _DEPTH, "n": together}
                try:
                    choices, _ = asking.completions(server, prompt, **body)
                except ServerRefusedError:
                    if len(self.ways) == 1:
                        raise
                    del self.ways[0]
                    continue
                drawn += choices
            self.strings[prompt][side].extend(answer.text[:_LETTERS] for answer in drawn)
            if side == 0:
                self.looked_at += len(drawn)
                self._bin(drawn)

    def _bin(self, answers: list[Said]) -> None:
        """Every token as a number that is uniform if it was drawn with the chances named."""
        for answer in answers:
            for token, top in zip(answer.tokens, answer.likeliest, strict=False):
                rank = self._place(token, top)
                self.bins[min(_BINS - 1, int(rank * _BINS))] += 1

    def _place(self, token: str, top: Mapping[str, float]) -> float:
        listed = sorted(top.items(), key=lambda item: -item[1])[:TOP]
        above = 0.0
        for other, logprob in listed:
            if other == token:
                return above + self.asking.chance.random() * math.exp(logprob)
            above += math.exp(logprob)
        return above + self.asking.chance.random() * max(0.0, 1.0 - above)

    def tests(self) -> list[tuple[str, int, ChiSquare]]:
        tests = []
        if sum(self.bins) >= 5 * _BINS:
            fit = goodness(self.bins, [1 / _BINS] * _BINS)
            tests.append(("each token / its logprobs", sum(self.bins), fit))
        parts = [part for pair in self.strings.values() if (part := _two_samples(*pair)).df > 0]
        if parts:
            joint = joined(parts)
            count = sum(len(one) for one, other in self.strings.values() if other)
            tests.append((f"first {_LETTERS} letters / reference", count, joint))
        return tests


def _two_samples(one: list[str], other: list[str]) -> ChiSquare:
    """Texts that are common stand alone, the others together."""
    if not (one and other):
        return ChiSquare(0.0, 0, 1.0, 0.0, 0.0)
    both = Counter(one) + Counter(other)
    common = [text for text, count in both.items() if count >= _FEW]
    counts = [[Counter(side)[text] for text in common] for side in (one, other)]
    rest = [len(side) - sum(counted) for side, counted in zip((one, other), counts, strict=True)]
    return homogeneity([*counts[0], rest[0]], [*counts[1], rest[1]])


def _clean(tokens: tuple[str, ...]) -> bool:
    """Whether these tokens are whole characters."""
    return not any("\ufffd" in token or token.startswith("bytes:") for token in tokens)


class StreamPart(CheckPart):
    """A stream says what the whole answer says, and brings as many tokens as it counts."""

    name, unit = "streams", "streams"

    def look(self, name: str, prompt: str) -> None:
        asking = self.asking
        body = {"prompt": prompt, "temperature": 0, "max_tokens": asking.max_tokens, "logprobs": 1}
        whole, _ = asking.greedy(prompt)
        asking.count()
        usage = {"stream_options": {"include_usage": True}}
        chunks = asking.server.stream("completions", {**body, **usage})
        parts = [Said.of(choice) for chunk in chunks for choice in chunk.get("choices") or ()]
        streamed = Said.joined(parts)
        self.looked_at += 1
        counted = next((n for n in map(tokens_of, reversed(chunks)) if n is not None), None)
        reasons = sum(part.reason is not None for part in parts)
        if reasons != 1:
            self.problems.append(f"{name}: {reasons} chunks with a finish_reason, not one")
        # Some count the end token, which is in no text.
        unsaid = (0, 1) if streamed.reason == "stop" else (0,)
        if streamed.tokens and counted is not None and counted - len(streamed.tokens) not in unsaid:
            brought = f"the stream brought {len(streamed.tokens)}"
            self.problems.append(f"{name}: {counted} tokens are counted, {brought}")
        elif "".join(whole.tokens) == whole.text and "".join(streamed.tokens) not in (
            "",
            streamed.text,
        ):
            self.problems.append(f"{name}: the tokens of the stream do not make its text")
        elif streamed.text != whole.text:
            again = asking.completion(asking.server, prompt)
            parted = parting(streamed, whole)
            if parted is not None and parted[1]:
                self.ties += 1
            elif again.text == whole.text:
                at = first_difference(streamed.text, whole.text)
                self.problems.append(f"{name}: stream and whole answer part at character {at}")


class LimitPart(CheckPart):
    """Stop strings, token limits and penalties."""

    name, unit = "limits", "texts"

    def look(self, name: str, prompt: str) -> None:
        asking = self.asking
        whole, _ = asking.greedy(prompt)
        self.looked_at += 1
        words = whole.text.split()
        stop = words[len(words) // 2] if len(words) > 2 else ""
        if stop and stop not in prompt:
            stopped = asking.completion(asking.server, prompt, stop=[stop])
            if stop in stopped.text:
                self.problems.append(f"{name}: the text holds its stop string {stop!r}")
            elif (
                whole.text.startswith(stopped.text)
                and stopped.text != whole.text.partition(stop)[0]
            ):
                self.problems.append(f"{name}: stop string {stop!r} ends the text elsewhere")
        (stopped, *_), answer = asking.completions(asking.server, prompt, max_tokens=3)
        counted = tokens_of(answer)
        if counted is not None and counted > 3:
            self.problems.append(f"{name}: {counted} tokens where max_tokens is 3")
        if asking.reference is not None:
            ours = asking.completion(asking.server, prompt, **_PENALTIES)
            theirs = asking.completion(asking.reference, prompt, **_PENALTIES)
            self.compare(f"{name}, with penalties", ours, theirs, _PENALTIES)


_KINDS = {"name": str, "count": int}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_TOOL = "look_up"
_FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
        }
    },
    "tool call": {
        "tools": [{"type": "function", "function": {"name": _TOOL, "parameters": _SCHEMA}}],
        "tool_choice": "required",  # of the one that there is; more servers know it than its name
    },
}


@dataclass
class StructurePart(CheckPart):
    """Answers under a schema, whole and streamed, are of its form; so are a tool's arguments."""

    name, unit = "structure", "answers"
    turn: int = 0

    def look(self, name: str, prompt: str) -> None:
        form = list(_FORMS)[self.turn % len(_FORMS)]
        self.turn += 1
        body = {
            "messages": [{"role": "user", "content": prompt}],
            **{"temperature": 0, "max_tokens": 120},
            **_FORMS[form],
        }
        asking, path = self.asking, "chat/completions"
        try:
            answer = asking.whole(asking.server, path, body)
            asking.count()
            chunks = asking.server.stream(path, body)
        except ServerRefusedError as error:
            self.note(f"{form} was not looked at: the server says {error}")
            return
        whole = [(choice["message"], choice.get("finish_reason")) for choice in answer["choices"]]
        deltas = [
            (choice.get("delta") or {}, choice.get("finish_reason"))
            for chunk in chunks
            for choice in chunk.get("choices") or ()
        ]
        texts = []
        for how, parts in (("", whole), (", streamed", deltas)):
            text, reason = _joined(form, parts)
            texts.append(text)
            self.looked_at += 1
            if reason == "length":
                continue  # cut off before its end
            wrong = _wrong(text)
            if wrong is not None:
                self.problems.append(f"{name}: {form}{how}: {wrong}: {text[:60]!r}")
        if texts[0] != texts[1]:
            again = asking.whole(asking.server, path, body)
            text, _ = _joined(form, [(choice["message"], None) for choice in again["choices"]])
            if text == texts[0]:
                self.problems.append(f"{name}: {form}: stream and whole answer differ")


def _joined(form: str, parts: list[tuple[dict[str, Any], str | None]]) -> tuple[str, str | None]:
    """Content, or the arguments of the first tool call, and how the answer ended."""
    text, reason = "", None
    for message, ended in parts:
        reason = ended or reason
        if form == "json_schema":
            text += message.get("content") or ""
        for call in (message.get("tool_calls") or ())[:1]:
            text += (call.get("function") or {}).get("arguments") or ""
    return text, reason


def _wrong(text: str) -> str | None:
    """Why a text is not of the schema, None if it is."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return "no JSON"
    if not isinstance(parsed, dict) or parsed.keys() != _KINDS.keys():
        return "other keys than the schema's"
    if not all(type(parsed[key]) is kind for key, kind in _KINDS.items()):
        return "values of other types than the schema's"
    return "a name longer than the schema allows" if len(parsed["name"]) > 12 else None
