"""Conversations to prompts: messages, tools and what a template makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.params import is_unicode, shown
from paceline.server.errors import APIError
from paceline.server.protocol import ChatMessage, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_INSTRUCTION = (
    "You may call functions. To call one, answer with nothing but JSON of the form "
    '{"name": NAME, "arguments": {...}}. The functions:'
)


def check_text(text: str, param: str) -> None:
    """Raises APIError if a text has lone surrogates (JSON's ``"\\ud800"`` alone)."""
    if not is_unicode(text):
        raise APIError(
            f"{param}: {shown(text)} has half a surrogate pair, which is no character", param=param
        )


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
) -> list[int]:
    """Token ids of a conversation, ready for the answer. Raises APIError.

    A template that knows tools gets them; for any other they are described in a system message.
    """
    for number, message in enumerate(messages):
        check_text(message.text(), f"messages.{number}.content")
    template = tokenizer.chat_template
    if template is None:
        raise APIError(
            "this model has no chat template; use /v1/completions", code="no_chat_template"
        )
    knows_tools = "tools" in (template if isinstance(template, str) else str(template))
    rendered = [_message(message, knows_tools) for message in messages]
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    options: dict[str, Any] = {}
    if described and knows_tools:
        options["tools"] = described
    elif described:
        rendered = _with_instruction(rendered, described)
    try:
        ids = tokenizer.apply_chat_template(
            rendered, add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
    except Exception as error:  # jinja errors of any kind: the template refused the messages
        reason = " ".join(str(error).split())
        raise APIError(
            f"the chat template refused the messages: {reason}", param="messages"
        ) from None
    return [int(token) for token in ids]


def _message(message: ChatMessage, knows_tools: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.text()}
    if message.name is not None:
        shown["name"] = message.name
    if knows_tools:
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        return shown
    if message.role == "tool":  # templates without tools know no such role
        return {"role": "user", "content": f"Result of the call: {message.text()}"}
    if message.tool_calls:
        calls = [
            json.dumps({"name": c.function.name, "arguments": _arguments(c.function.arguments)})
            for c in message.tool_calls
        ]
        shown["content"] = "\n".join(filter(None, [message.text(), *calls]))
    return shown


def _arguments(text: str) -> Any:
    """Templates want the arguments as an object; what is none stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_instruction(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"]) for tool in tools)
    text = f"{_INSTRUCTION}\n{functions}"
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
