"""Function calls: the grammar that forces one, and calls parsed from a model's JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Set
from typing import Any

from paceline.core.params import Grammar
from paceline.server.api.protocol import ChatRequest

Call = dict[str, Any]


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request that must call one function or any; None otherwise."""
    if request.choice in (None, "none", "auto"):
        return None
    names = request.callable_names
    tools = [tool for tool in request.offered if tool.function.name in names]
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
