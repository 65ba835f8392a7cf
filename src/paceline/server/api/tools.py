"""Parses the tool calls of answers, which a grammar forces or the text contains.

Text is passed on as soon as it arrives, up to what may be a call. A complete answer is parsed like
a stream of one piece. Recognised formats of calls:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes; anywhere
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]             Mistral; anywhere
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, also without the tag
    ```json {"name": ..., "arguments": {...}} ```                Gemma and others
                                                  the last two only if they are the whole answer"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence, Set
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


class ForcedCallParser(TextParser):
    """Parses an answer that a grammar makes a call. The arguments stream as they are written."""

    # The grammar writes JSON on one line in exactly this format (request/grammar.py).
    _HEAD = re.compile(r'\{"name": "([^"]+)", "arguments": ')

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0  # characters of it up to the end of the arguments sent so far

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        if not self._sent:
            head = self._HEAD.match(self._text)
            if head is None:
                return []
            self._sent = head.end()
            deltas = [{"tool_calls": [{"index": 0, **new_tool_call(head[1], "")}]}]
        # The last brace is the call's own, not one of the arguments.
        return [*deltas, *self._send(len(self._text) - 1)]

    def _send(self, end: int) -> list[Delta]:
        """Send the arguments up to ``end`` of the text."""
        piece, self._sent = self._text[self._sent : end], max(self._sent, end)
        return [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}] if piece else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        if not self._sent:
            return [], reason
        try:
            json.loads(self._text)
        except (ValueError, RecursionError):  # cut off
            return self._send(len(self._text)), reason
        return [], "tool_calls"


_TAG = re.compile(r"(?:<tool_call>|\[TOOL_CALLS\])\s*")
_CLOSING_TAG = re.compile(r"\s*</tool_call>|")
# What may stand around a call that is the whole answer.
_BEGIN = re.compile(r"\s*(?:<\|python_tag\|>|```json|```tool_code)?\s*")
_END = re.compile(r"\s*(?:```)?\s*")
_TAGS = "<tool_call>", "[TOOL_CALLS]"
_BEGINNINGS = (*_TAGS, "<|python_tag|>", "```json", "```tool_code", "{", "[")


class ToolCallParser(TextParser):
    """Parses an answer of text, tool calls, or both. Text streams up to what begins like a call;
    the rest is parsed once it is complete. Text around calls, and text that only looks like a call,
    is content; whitespace next to calls is dropped. ``parallel``: several calls."""

    def __init__(self, tools: Sequence[Tool], parallel: bool) -> None:
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._buffer = ""  # text that has not been shown
        self._has_shown = False

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        start = self._buffer.lstrip()
        if not self._has_shown and any(
            start.startswith(beginning) or beginning.startswith(start) for beginning in _BEGINNINGS
        ):
            return []
        tag = _TAG.search(self._buffer)
        known = tag.start() if tag else len(self._buffer) - longest_overlap(self._buffer, _TAGS)
        content = self._buffer[:known].rstrip()
        self._buffer = self._buffer[len(content) :]
        self._has_shown = self._has_shown or bool(content)
        return [{"content": content}] if content else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        content, calls = self._split()
        if calls:
            content = content.rstrip() if self._has_shown else content.strip()
            reason = "tool_calls" if reason == "stop" else reason
        deltas: list[Delta] = [{"content": content}] if content else []
        for index, call in enumerate(calls if self._parallel else calls[:1]):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        return deltas, reason

    def _split(self) -> tuple[str, list[Call]]:
        """The rest of the text without its calls, and the calls."""
        text, begin = self._buffer, _BEGIN.match(self._buffer)
        if begin is not None and not self._has_shown:
            calls, end = parse_tool_calls(text, begin.end(), self._names)
            if calls and _END.fullmatch(text, end):
                return "", calls
        content, calls, position = "", [], 0
        for tag in _TAG.finditer(text):
            if tag.start() >= position:  # not within a call
                tagged, end = parse_tool_calls(text, tag.end(), self._names)
                if tagged:
                    content += text[position : tag.start()]
                    position = end
                    calls += tagged
        return content + text[position:], calls


# -- calls as JSON ---------------------------------------------------------------------------------


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request whose ``tool_choice`` forces a call; None for other requests."""
    if request.tool_choice in (None, "none", "auto"):
        return None
    functions = request.callable_tools.items()
    definitions: dict[str, Any] = {
        # Arguments are an object, whether or not the schema says so. Without a schema it is empty.
        name: {"type": "object", **_rebased(f.parameters or {"properties": {}}, f"#/$defs/{name}")}
        for name, f in functions
    }
    schema: dict[str, Any] = {"$defs": definitions}
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


_DECODER = json.JSONDecoder(parse_constant=int)  # refuses NaN, which is not JSON


def parse_tool_calls(text: str, start: int, names: Set[str]) -> tuple[list[Call], int]:
    """The calls in the JSON (an object or a list) at ``start`` of a text, and where that ends, a
    closing tag included. [] if it is malformed, or calls others than ``names``."""
    try:
        parsed, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return [], start
    calls = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in names:
            return [], start
        arguments = item.get("arguments", item.get("parameters"))
        arguments = {} if arguments is None else arguments
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(new_tool_call(name, written))
    closing = _CLOSING_TAG.match(text, end)
    return calls, closing.end() if closing else end


def new_tool_call(name: str, arguments: str, identifier: str | None = None) -> Call:
    """A tool call in the format of chat messages, by default with a new id."""
    if identifier is None:
        identifier = f"call_{uuid.uuid4().hex[:24]}"
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}
