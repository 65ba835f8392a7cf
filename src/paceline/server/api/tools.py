"""Parses the tool calls of answers, which a grammar forces or the text contains.

Text is passed on as soon as it arrives; text that may be a tool call is held back until that is
known. A complete answer is parsed like a stream of one piece. Recognised formats of calls:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes; anywhere
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]             Mistral; anywhere
    ```json {"name": ..., "arguments": {...}} ```                Gemma and others; anywhere
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, also without the tag; only
                                                                 if it is the whole answer"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from typing import Any

from paceline.core.params import Grammar
from paceline.request.completion import StreamEvent
from paceline.request.text import longest_overlap
from paceline.server.api.protocol import ChatRequest, Tool

Call = dict[str, Any]
Delta = dict[str, Any]
THOUGHT = "reasoning_content"  # the delta of a thought


class TextParser:
    """Turns the growing text of a choice into OpenAI's deltas. This one expects no tool calls.
    ``thoughts``: all that came so far; ``shows_thoughts``: they are among the deltas."""

    thoughts = ""
    shows_thoughts = True

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """The last deltas and the finish reason, given that of the text."""
        return [], reason


def parse_event(parser: TextParser, event: StreamEvent) -> tuple[list[Delta], str | None]:
    """The deltas of an event, and the finish reason if it is the last one."""
    deltas, reason = parser.feed(event.text), None
    if event.completion is not None:
        rest, reason = parser.finish(event.completion.finish_reason)
        deltas = [*deltas, *rest]
    parser.thoughts += "".join(delta.get(THOUGHT, "") for delta in deltas)
    if not parser.shows_thoughts:
        deltas = [delta for delta in deltas if THOUGHT not in delta]
    return deltas, reason


def message_from_deltas(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Merge all deltas of a choice into its message."""
    content = thought = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content, thought = content + delta.get("content", ""), thought + delta.get(THOUGHT, "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                call = {key: value for key, value in part.items() if key != "index"}
                calls.append({**call, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"content": content or None if calls else content}
    return (
        message | ({THOUGHT: thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
    )


class _JsonEndFinder:
    """Finds the end of a JSON object or list by counting brackets; the JSON may be malformed."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """The position in ``text`` after the closing bracket; None if it is not in ``text``."""
        for end, character in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._quoted = not self._quoted
            elif self._quoted:
                self._escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return end
        return None


class ForcedCallParser(TextParser):
    """Parses an answer that a grammar forces to be one tool call: its name, then its arguments as
    they arrive. If the answer is cut off within the name, and only one of ``names`` begins like
    this, it becomes a call of that function without arguments; otherwise it is empty."""

    # The grammar writes JSON on one line in exactly this format (request/grammar.py).
    _HEAD = re.compile(r'\{"name": "([^"]+)", "arguments": ')

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._text = ""  # up to the arguments
        self._in_arguments = self._is_complete = False
        self._json_end = _JsonEndFinder()

    def feed(self, text: str) -> list[Delta]:
        if self._is_complete:
            return []
        deltas: list[Delta] = []
        if not self._in_arguments:
            self._text += text
            head = self._HEAD.match(self._text)
            if head is None:
                return []
            self._in_arguments = True
            self._json_end.feed("{")  # the call's own brace; the arguments end before its closing
            deltas.append({"tool_calls": [{"index": 0, **new_tool_call(head[1], "")}]})
            text = self._text[head.end() :]
        end = self._json_end.feed(text)
        self._is_complete = end is not None
        if piece := text if end is None else text[: end - 1]:
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        return deltas

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        if self._in_arguments:
            return [], "tool_calls" if self._is_complete else reason
        heads = {name: f'{{"name": "{name}", "arguments": ' for name in self._names}
        candidates = [name for name, head in heads.items() if head.startswith(self._text)]
        if len(candidates) != 1:
            return [], reason
        return [{"tool_calls": [{"index": 0, **new_tool_call(candidates[0], "")}]}], reason


# The opening tags of calls inside a text, with their closing tags.
_FENCES = dict.fromkeys(("```json", "```tool_code", "```"), "```")
_TAGS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", **_FENCES}
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_PYTHON_TAG = "<|python_tag|>"  # only at the beginning of an answer, as JSON without a tag


class ToolCallParser(TextParser):
    """Parses an answer of text, tool calls, or both. Text around calls, and text that only looks
    like a call, is content; whitespace next to calls is dropped. ``parallel``: several calls."""

    def __init__(self, tools: Sequence[Tool], parallel: bool) -> None:
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._deltas: list[Delta] = []  # new ones, to be returned
        self._trailing_space = ""  # whitespace at the end of the content so far
        self._in_code = self._has_content = False
        self._num_calls = 0
        self._buffer = ""  # text that is not yet known to be content or a call
        self._calls: list[dict[str, Any]] = []  # parsed, but the closing tag is not complete
        self._parser = self._parse()

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        next(self._parser)
        return self._take_deltas()

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        truncated = bool(self._buffer) and not self._calls
        if self._calls:  # the buffer has at most a part of the closing tag
            self._add_calls(len(self._buffer))
        self._add_content(len(self._buffer))
        if self._trailing_space and not self._num_calls:
            self._deltas.append({"content": self._trailing_space})
        if self._num_calls and (reason == "stop" or not truncated):
            reason = "tool_calls"
        return self._take_deltas(), reason

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # The parser consists of generators, which yield when they need more text in ``_buffer``.

    def _parse(self) -> Iterator[None]:
        while any(tag.startswith(self._buffer.lstrip()) for tag in (*_TAGS, _PYTHON_TAG)):
            yield  # whitespace, or the beginning of a tag
        start = self._buffer.lstrip()
        tagged = start.startswith(_PYTHON_TAG)
        if tagged or (start[0] in "{[" and not start.startswith(tuple(_TAGS))):
            tag = _PYTHON_TAG if tagged else ""
            yield from self._parse_block(tag, len(self._buffer) - len(start))
        while True:
            match = _TAG.search(self._buffer)
            if match is None:
                self._add_content(len(self._buffer) - longest_overlap(self._buffer, tuple(_TAGS)))
                yield
            elif match[0] in _FENCES and self._in_code:
                self._in_code = False
                self._add_content(match.start() + len("```"))
            elif self._may_grow(match[0], match.start()):
                self._add_content(match.start())
                yield
            else:
                yield from self._parse_block(match[0], match.start())

    def _may_grow(self, tag: str, start: int) -> bool:
        """Whether the tag at ``start`` of the buffer may be the beginning of a longer one."""
        rest = self._buffer[start:]
        return any(longer != tag and longer.startswith(rest) for longer in _TAGS)

    def _parse_block(self, tag: str, start: int) -> Iterator[None]:
        """Parse the calls behind a tag at ``start`` of the buffer; without any it is content."""
        self._add_content(start)
        end = yield from self._find_calls(tag)
        if self._calls:
            self._add_calls(end)
        else:
            self._in_code = self._in_code or tag in _FENCES
            self._add_content(end)

    def _find_calls(self, tag: str) -> Generator[None, None, int]:
        """Parse a tag at the start of the buffer, JSON and the closing tag; returns where they end.
        ``_calls`` is empty afterwards if these are no calls."""
        while not (text := self._buffer[len(tag) :].lstrip()):
            yield
        start = len(self._buffer) - len(text)
        if text[0] not in "{[":
            return start
        brackets, searched = _JsonEndFinder(), start
        while (length := brackets.feed(self._buffer[searched:])) is None:
            searched = len(self._buffer)
            yield
        end = searched + length
        self._calls = parse_tool_calls(self._buffer[start:end], self._names)
        closing = _TAGS.get(tag)  # None: nothing may follow
        while self._calls and closing != "":
            rest = self._buffer[end:].lstrip()
            rest_start = len(self._buffer) - len(rest)
            if closing is not None and rest.startswith(closing):
                return rest_start + len(closing)
            if rest and not (closing or "").startswith(rest):
                end, self._calls = rest_start, []
            else:
                yield
        return end

    def _add_calls(self, end: int) -> None:
        """Emit the parsed calls, which extend to ``end`` of the buffer."""
        for call in self._calls if self._parallel else self._calls[: not self._num_calls]:
            self._deltas.append({"tool_calls": [{"index": self._num_calls, **call}]})
            self._num_calls += 1
        self._calls, self._buffer = [], self._buffer[end:]

    def _add_content(self, end: int) -> None:
        """Emit the buffer up to ``end`` as content; trailing whitespace is held back."""
        text, self._buffer = self._trailing_space + self._buffer[:end], self._buffer[end:]
        body = text.rstrip()
        self._trailing_space = text[len(body) :]
        if self._num_calls and not self._has_content:
            body = body.lstrip()
        if body:
            self._has_content = True
            self._deltas.append({"content": body})


# -- calls as JSON ---------------------------------------------------------------------------------


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request whose ``tool_choice`` forces a call; None for other requests."""
    if request.tool_choice in (None, "none", "auto"):
        return None
    functions = request.callable_tools.items()
    schema: dict[str, Any] = {
        "$defs": {name: _rebased(f.parameters, f"#/$defs/{name}") for name, f in functions}
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, _ in functions
    ]
    schema |= calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Grammar("json", json.dumps(schema))


def _rebased(schema: Any, path: str) -> Any:
    """A schema that is moved to ``path`` of another document, with its references adjusted."""
    if isinstance(schema, list):
        return [_rebased(item, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebased(value, path) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = path + reference[1:]
    return rebased


def parse_tool_calls(text: str, names: Set[str]) -> list[Call]:
    """The calls in JSON text, an object or a list; [] unless all of them call one of ``names``."""
    try:
        parsed = json.loads(text, parse_constant=int)  # refuses NaN, which is not JSON
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in names:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(new_tool_call(name, text))
    return calls


def new_tool_call(name: str, arguments: str, identifier: str | None = None) -> Call:
    """A tool call in the format of chat messages, by default with a new id."""
    if identifier is None:
        identifier = f"call_{uuid.uuid4().hex[:24]}"
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}
