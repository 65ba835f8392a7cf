"""Function calls: the grammar that forces one, and finding them in what a model wrote."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from paceline.core.params import Grammar
from paceline.server.protocol import ChatRequest, NamedTool, Tool

# Qwen and Hermes wrap a call in these; Llama 3 writes the JSON alone, perhaps after a python tag.
_WRAPPED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_TAG = "<|python_tag|>"


def forced_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of a request that must call: a named function, or any of them."""
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    calls = [_call_schema(tool) for tool in tools]
    return Grammar("json", json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls}))


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.function.parameters,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def find_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """What is left of the text, and the calls in it, as OpenAI's API has them.

    A text that merely looks like a call of no known function stays text.
    """
    known = {tool.function.name for tool in tools}
    wrapped = list(_WRAPPED.finditer(text))
    candidates = [match[1] for match in wrapped] or [text.strip().removeprefix(_TAG).strip()]
    calls = []
    for candidate in candidates:
        call = _as_call(candidate, known)
        if call is None:
            return text, []
        calls.append(call)
    rest = _WRAPPED.sub("", text).strip() if wrapped else ""
    return rest, calls


def _as_call(text: str, known: set[str]) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") not in known:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {
            "name": call["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }
