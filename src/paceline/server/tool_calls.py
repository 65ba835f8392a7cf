"""Function calls: the grammar that forces one, and finding them in what a model wrote.

Families differ in how they write a call; known are

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]             Mistral
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, also without the tag
    ```json {"name": ..., "arguments": {...}} ```                Gemma and others
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from paceline.core.params import Grammar
from paceline.server.protocol import ChatRequest, NamedTool, Tool

# What a call may begin with, at the start of an answer or, the first two, after some text.
TAGS = ("<tool_call>", "[TOOL_CALLS]")
OPENINGS = (*TAGS, "<|python_tag|>", "```json", "```tool_code", "```", "{", "[{")
_WRAPPED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_FENCED = re.compile(r"```(?:json|tool_code)?\s*(.*?)\s*(?:```|$)", re.DOTALL)

Call = dict[str, Any]


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request that must call: a named function, or any of them."""
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    names = [tool.function.name for tool in tools]
    schema: dict[str, Any] = {
        "$defs": {
            name: _moved(tool.function.parameters, f"#/$defs/{name}")
            for name, tool in zip(names, tools, strict=True)
        }
    }
    calls = [_call_schema(name) for name in names]
    schema |= calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Grammar("json", json.dumps(schema))


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "arguments": {"$ref": f"#/$defs/{name}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema that is no longer the document's root but lies at ``place``: its references too."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def find_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """What is left of the text, and the calls in it, as OpenAI's API has them.

    A text that merely looks like a call, or calls what is no tool, stays text.
    """
    known = {tool.function.name for tool in tools}
    for rest, candidates in _readings(text):
        found = [_as_call(item, known) for part in candidates for item in _items(part)]
        calls = [call for call in found if call is not None]
        if calls and len(calls) == len(found):
            return rest.strip(), calls
    return text, []


def _readings(text: str) -> list[tuple[str, list[str]]]:
    """Ways to read a text: what is not part of a call, and the JSON of the calls."""
    readings = []
    if TAGS[0] in text:
        readings.append((_WRAPPED.sub("", text), _WRAPPED.findall(text)))
    if TAGS[1] in text:
        before, _, calls = text.partition(TAGS[1])
        readings.append((before, [calls.strip()]))
    bare = text.strip().removeprefix("<|python_tag|>").strip()
    readings.append(("", [bare]))
    if "```" in text:
        readings.append((_FENCED.sub("", text), _FENCED.findall(text)))
    return readings


def _items(text: str) -> list[Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return [None]
    return parsed if isinstance(parsed, list) and parsed else [parsed]


def _as_call(item: Any, known: set[str]) -> Call | None:
    if not isinstance(item, dict) or item.get("name") not in known:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    return call_of(item["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def call_of(name: str, arguments: str) -> Call:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
