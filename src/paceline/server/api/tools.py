"""Functions that answers call: forced by a grammar, or found in the text while it grows. Text goes
out at once, what may be a call waits.

A whole answer is one fed in one piece. Forms of calls that are known:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes; anywhere
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]             Mistral; anywhere
    ```json {"name": ..., "arguments": {...}} ```                Gemma and others; anywhere
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, also without the tag;
                                                                 nothing else is in the answer
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

from paceline.core.params import Grammar
from paceline.server.api.protocol import ChatRequest, Tool

if TYPE_CHECKING:
    from paceline.request.completion import StreamEvent

Call = dict[str, Any]
Delta = dict[str, Any]


class AnswerStream:
    """Reads one choice of a chat, here one without calls. Deltas are those of OpenAI's chunks."""

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """The last deltas, and the finish reason."""
        return [], reason


def deltas_of(stream: AnswerStream, event: StreamEvent) -> tuple[list[Delta], str | None]:
    """What an event adds, and the finish reason if the answer ended."""
    deltas = stream.feed(event.text)
    if event.completion is None:
        return deltas, None
    rest, reason = stream.finish(event.completion.finish_reason)
    return [*deltas, *rest], reason


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message that these deltas make up."""
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


class _JsonEnd:
    """Finds the end of a JSON object or list by its brackets, well-formed or not."""

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """The position in ``text`` after the last bracket, once that has come."""
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


class ForcedCall(AnswerStream):
    """A call forced by a grammar: its name, then its arguments as they come. If it is cut off in
    the name it is a call without arguments where only one of ``names`` fits, else nothing."""

    # JSON on one line, as the grammar writes it (request/grammar.py).
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
        self._end.feed("{")  # the call's brace, whose end is not part of the arguments
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


# Beginnings and ends of calls inside a text.
_TAGS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "```": "```"}
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_ALONE = "<|python_tag|>"  # only at the beginning of an answer, like JSON without a tag
_LABELS = ("json", "tool_code")  # of fences
_LEAD = re.compile(r"\s*")
_FENCE_LEAD = re.compile(rf"(?:{'|'.join(_LABELS)})?\s*")
_JSON = re.compile(r'(?:\{|\[\s*\{)\s*"')  # how a call's JSON begins
_UNCLEAR = re.compile(r"(?:\{\s*|\[\s*(?:\{\s*)?)?")
_HEAD_LIMIT = 256  # characters from a tag to the first quote


def _begun_tag(text: str) -> int:
    """Length of the longest end of ``text`` that begins a tag."""
    for length in range(min(len(text), max(map(len, _TAGS)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in _TAGS):
            return length
    return 0


class PossibleCall(AnswerStream):
    """An answer of text, calls, or both. Text around calls is content, without the blanks next to
    calls; so is what only looks like a call."""

    def __init__(self, tools: Sequence[Tool], parallel: bool) -> None:
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self._blanks = ""  # at the end of the content so far
        self._in_code = self._has_content = False
        self._calls = 0
        self._waiting = ""  # read, but not yet decided
        self._parsed: list[dict[str, Any]] = []  # calls that wait for what closes them
        self._reading = self._read()

    def feed(self, text: str) -> list[Delta]:
        self._waiting += text
        next(self._reading)
        return self._taken()

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        cut = bool(self._waiting) and not self._parsed
        if self._parsed:  # what waits is at most a part of the closing tag
            self._call(len(self._waiting))
        self._add_content(len(self._waiting))
        if self._blanks and not self._calls:
            self._deltas.append({"content": self._blanks})
        if self._calls and (reason == "stop" or not cut):
            reason = "tool_calls"
        return self._taken(), reason

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # These go on whenever more has come.

    def _read(self) -> Iterator[None]:
        while any(tag.startswith(self._waiting.lstrip()) for tag in (*_TAGS, _ALONE)):
            yield  # any tag may follow blanks
        start = self._waiting.lstrip()
        alone = start.startswith(_ALONE)
        if alone or (start[0] in "{[" and not start.startswith(tuple(_TAGS))):
            yield from self._open(_ALONE if alone else "", len(self._waiting) - len(start))
        while True:
            match = _TAG.search(self._waiting)
            if match is None:
                self._add_content(len(self._waiting) - _begun_tag(self._waiting))
                yield
            elif match[0] == "```" and self._in_code:
                self._in_code = False
                self._add_content(match.end())
            else:
                yield from self._open(match[0], match.start())

    def _open(self, tag: str, start: int) -> Iterator[None]:
        self._add_content(start)
        end = yield from self._block(tag)
        if self._parsed:
            self._call(end)
        else:  # it is content
            self._in_code = self._in_code or tag == "```"
            self._add_content(end)

    def _block(self, tag: str) -> Generator[None, None, int]:
        """Where tag, JSON and closing tag end. If it is no call ``_parsed`` is then empty."""
        lead = _FENCE_LEAD if tag == "```" else _LEAD
        while True:
            follows = self._waiting[len(tag) :]
            blanks = lead.match(follows)
            assert blanks is not None
            start = blanks.end()
            begun = _JSON.match(follows, start)
            unclear = begun is None and _UNCLEAR.fullmatch(follows, start)
            if tag == "```" and any(label.startswith(follows) for label in _LABELS):
                yield
            elif begun is not None and begun.end() <= _HEAD_LIMIT:
                break
            elif unclear and len(follows) <= _HEAD_LIMIT:
                yield
            else:
                return len(tag) + start
        brackets, followed = _JsonEnd(), len(tag) + start
        while (length := brackets.feed(self._waiting[followed:])) is None:
            followed = len(self._waiting)
            yield
        end = followed + length
        self._parsed = calls_in(self._waiting[len(tag) + start : end], self._names)
        closing = _TAGS.get(tag)  # None: nothing else may follow
        while self._parsed and closing != "":
            rest = self._waiting[end:].lstrip()
            after = len(self._waiting) - len(rest)
            if closing is not None and rest.startswith(closing):
                return after + len(closing)
            if rest and not (closing or "").startswith(rest):
                end, self._parsed = after, []
            else:
                yield
        return end

    def _call(self, end: int) -> None:
        for call in self._parsed if self._parallel else self._parsed[: not self._calls]:
            self._deltas.append({"tool_calls": [{"index": self._calls, **call}]})
            self._calls += 1
        self._parsed, self._waiting = [], self._waiting[end:]

    def _add_content(self, end: int) -> None:
        """The waiting text up to ``end``."""
        text, self._waiting = self._blanks + self._waiting[:end], self._waiting[end:]
        body = text.rstrip()
        self._blanks = text[len(body) :]
        if self._calls and not self._has_content:
            body = body.lstrip()
        if body:
            self._has_content = True
            self._deltas.append({"content": body})


# -- calls as JSON ---------------------------------------------------------------------------------


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request that must call one function or any; None otherwise."""
    if request.tool_choice in (None, "none", "auto"):
        return None
    functions = request.callable_tools.items()
    schema: dict[str, Any] = {
        "$defs": {name: _moved(f.parameters, f"#/$defs/{name}") for name, f in functions}
    }
    calls = [_call_schema(name) for name, _ in functions]
    schema |= calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Grammar("json", json.dumps(schema))


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, path: str) -> Any:
    """A schema moved to ``path`` of a document: its references change, too."""
    if isinstance(schema, list):
        return [_moved(item, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, path) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = path + reference[1:]
    return moved


def calls_in(text: str, names: Set[str]) -> list[Call]:
    """The calls in a JSON text (an object, or a list); [] unless all are of ``names``."""
    try:
        parsed = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return []
    items = parsed if isinstance(parsed, list) else [parsed]
    calls = [_as_call(item, names) for item in items]
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else []


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _as_call(item: Any, names: Set[str]) -> Call | None:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    return call_of(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def call_of(name: str, arguments: str, identifier: str | None = None) -> Call:
    """A call as chat messages have it, by default with a new id."""
    known = f"call_{uuid.uuid4().hex[:24]}" if identifier is None else identifier
    return {"id": known, "type": "function", "function": {"name": name, "arguments": arguments}}
