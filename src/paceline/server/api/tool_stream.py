"""Answers with tools, as they grow: what is text may go out, what may be a call must wait.

A whole answer is one that came in one piece, so it cannot differ from a streamed one. Families
differ in how they write a call; known are

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes; anywhere
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]             Mistral; anywhere
    ```json {"name": ..., "arguments": {...}} ```                Gemma and others; anywhere
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, also without the tag;
                                                                 nothing else is in the answer
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.server.api.protocol import Tool
from paceline.server.api.tool_calls import call_of, calls_in

if TYPE_CHECKING:
    from paceline.request.completion import StreamEvent

Delta = dict[str, Any]


class AnswerStream(Protocol):
    """One choice of a chat. Deltas are those of OpenAI's chunks."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """The last deltas, and the reason why the answer ended, of which calls are one."""
        ...


def deltas_of(stream: AnswerStream, event: StreamEvent) -> tuple[list[Delta], str | None]:
    """What an event adds, and the reason why the answer ended, if it did."""
    deltas = stream.feed(event.text)
    if event.completion is None:
        return deltas, None
    rest, reason = stream.finish(event.completion.finish_reason)
    return [*deltas, *rest], reason


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """What a client makes of the deltas of a text: the message of a whole answer."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                call = {key: value for key, value in part.items() if key != "index"}
                calls.append({**call, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


class TextAnswer:
    """An answer that cannot be a call."""

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        return [], reason


class _JsonEnd:
    """Follows a JSON object or list to its end; whether it is well-formed is another question."""

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """The position in ``text`` behind the last bracket, once that has come."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (self._INSIDE if self._quoted else self._OUTSIDE).search(text, position)
            if match is None:
                return None
            position = match.end()
            mark = match[0]
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


class ForcedCall:
    """An answer whose grammar makes it a call: name first, then the arguments as they come. It is
    never text: one that was cut off in its name is a call without arguments, if it can only be one
    of ``names``, and nothing otherwise."""

    # The layout is the grammar's (request/grammar.py): JSON on one line.
    _HEAD = re.compile(r'\{"name": "([^"]+)", "arguments": ')

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._text = ""  # before the arguments
        self._named = self._whole = False
        self._end = _JsonEnd()

    def feed(self, text: str) -> list[Delta]:
        if self._whole:
            return []
        if self._named:
            return self._arguments(text)
        self._text += text
        head = self._HEAD.match(self._text)
        if head is None:
            return []
        self._named = True
        self._end.feed("{")  # the call's own, whose end is not part of the arguments
        named: Delta = {"tool_calls": [{"index": 0, **call_of(head[1], "")}]}
        return [named, *self._arguments(self._text[head.end() :])]

    def _arguments(self, text: str) -> list[Delta]:
        end = self._end.feed(text)
        self._whole = end is not None
        piece = text if end is None else text[: end - 1]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}] if piece else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        if self._named:
            return [], "tool_calls" if self._whole else reason
        heads = {name: f'{{"name": "{name}", "arguments": ' for name in self._names}
        calls = [name for name, head in heads.items() if head.startswith(self._text)]
        if len(calls) != 1:
            return [], reason
        return [{"tool_calls": [{"index": 0, **call_of(calls[0], "")}]}], reason


# What calls in the middle of a text begin and end with.
_TAGS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "```": "```"}
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_ALONE = "<|python_tag|>"  # at the beginning of an answer only, as is JSON without a tag
_LABELS = ("json", "tool_code")  # of fences
_LEAD = re.compile(r"\s*")
_FENCE_LEAD = re.compile(rf"(?:{'|'.join(_LABELS)})?\s*")
_JSON = re.compile(r'(?:\{|\[\s*\{)\s*"')  # what is none of these is no call
_UNCLEAR = re.compile(r"(?:\{\s*|\[\s*(?:\{\s*)?)?")
_HEAD_LIMIT = 256  # characters from a tag to the first quote


def _begun_tag(text: str) -> int:
    """Length of the longest end of ``text`` that a tag begins with."""
    for length in range(min(len(text), max(map(len, _TAGS)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in _TAGS):
            return length
    return 0


class PossibleCall:
    """An answer that may be text, calls, or both. Text before, between and after calls is content,
    without the blanks next to calls; what looks like a call and is none is content, too."""

    def __init__(self, tools: Sequence[Tool], parallel: bool) -> None:
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self._blanks = ""  # at the end of the content so far
        self._at_start, self._in_code, self._has_content = True, False, False
        self._calls = 0
        self._held = ""  # read, but not yet decided
        # Of what may be a call, with whose tag ``_held`` then begins: where its JSON begins, how
        # far that has been followed, where it ends, and the calls that it is.
        self._tag: str | None = None
        self._json_from: int | None = None
        self._followed = self._json_end = 0
        self._end = _JsonEnd()
        self._parsed: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        while self._held and (self._text() if self._tag is None else self._block()):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        cut = bool(self._held)
        if self._parsed:  # what is held is at most a part of the closing tag
            self._call(len(self._held))
            cut = False
        elif self._held:
            self._add_content(self._held)
        if self._blanks and not self._calls:
            self._deltas.append({"content": self._blanks})
        deltas, self._deltas = self._deltas, []
        if self._calls and (reason == "stop" or not cut):
            reason = "tool_calls"
        return deltas, reason

    # Each reads what it can of ``_held``; true if there is more to do with the rest.

    def _text(self) -> bool:
        if self._at_start:
            start = self._held.lstrip()
            if any(tag.startswith(start) for tag in (*_TAGS, _ALONE)):
                return False  # nothing but blanks is a beginning of everything
            self._at_start = False
            alone = start.startswith(_ALONE)
            if alone or (start[0] in "{[" and not start.startswith(tuple(_TAGS))):
                return self._open(_ALONE if alone else "", len(self._held) - len(start))
        match = _TAG.search(self._held)
        if match is None:
            self._add_held(len(self._held) - _begun_tag(self._held))
            return False
        if match[0] == "```" and self._in_code:
            self._in_code = False
            self._add_held(match.end())
            return True
        return self._open(match[0], match.start())

    def _open(self, tag: str, start: int) -> bool:
        self._add_held(start)
        self._tag, self._json_from = tag, None
        return True

    def _block(self) -> bool:
        """A tag and what follows it: JSON, and what closes that."""
        if self._json_from is None:
            return self._begin_json()
        if not self._parsed:
            end = self._end.feed(self._held[self._followed :])
            if end is None:
                self._followed = len(self._held)
                return False
            self._json_end = self._followed + end
            self._parsed = calls_in(self._held[self._json_from : self._json_end], self._names)
            if not self._parsed:
                return self._reject(self._json_end)
        closing = _TAGS.get(self._tag or "")  # None: nothing else may follow
        rest = self._held[self._json_end :].lstrip()
        after = len(self._held) - len(rest)
        if closing == "":
            return self._call(self._json_end)
        if closing is not None and rest.startswith(closing):
            return self._call(after + len(closing))
        if not rest or (closing or "").startswith(rest):
            return False
        return self._reject(after)

    def _begin_json(self) -> bool:
        """From the tag to where the JSON has begun."""
        tag = self._tag or ""
        fence, follows = tag == "```", self._held[len(tag) :]
        if fence and any(label.startswith(follows) for label in _LABELS):
            return False
        lead = (_FENCE_LEAD if fence else _LEAD).match(follows)
        assert lead is not None
        begun = _JSON.match(follows, lead.end())
        if begun is not None and begun.end() <= _HEAD_LIMIT:
            self._json_from = self._followed = len(tag) + lead.end()
            self._end = _JsonEnd()
            return True
        unclear = _UNCLEAR.fullmatch(follows, lead.end())
        if begun is None and unclear is not None and len(follows) <= _HEAD_LIMIT:
            return False
        return self._reject(len(tag) + lead.end())

    def _reject(self, end: int) -> bool:
        """What is held up to ``end`` is no call but text."""
        self._in_code = self._in_code or self._tag == "```"
        self._tag, self._parsed = None, []
        self._add_held(end)
        return True

    def _call(self, end: int) -> bool:
        for call in self._parsed if self._parallel else self._parsed[: not self._calls]:
            self._deltas.append({"tool_calls": [{"index": self._calls, **call}]})
            self._calls += 1
        self._tag, self._parsed, self._held = None, [], self._held[end:]
        return True

    def _add_held(self, end: int) -> None:
        text, self._held = self._held[:end], self._held[end:]
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        whole = self._blanks + text
        body = whole.rstrip()
        self._blanks = whole[len(body) :]
        if not body:
            return
        if self._calls and not self._has_content:
            body = body.lstrip()
        self._has_content = True
        self._deltas.append({"content": body})
