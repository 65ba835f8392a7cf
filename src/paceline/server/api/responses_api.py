"""Request bodies of OpenAI's ``/v1/responses``, and their conversion to ``ChatRequest``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.core.params import is_unicode
from paceline.request.validation import text_of
from paceline.server.api import blocks
from paceline.server.api.protocol import MAX_LOGPROBS, ChatRequest, Generation, JsonSchema
from paceline.server.api.tools import new_tool_call
from paceline.server.fields import Body

OutputItem = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: str | None = None


class Reasoning(Body):
    """``effort`` goes to the chat template; ``summary`` is ignored."""

    effort: str | None = None
    summary: str | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Body):
    """Functions in a namespace; calls name the namespace, too."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool] = Field(max_length=128)


# The tools of a request, without those that OpenAI's servers would run.
OfferedTools = Annotated[
    list[FunctionTool | Namespace],
    blocks.drop_hosted_tools(
        *("web_search", "file_search", "code_interpreter", "image_generation", "mcp"),
        *("tool_search", "programmatic_tool_calling"),
    ),
]


class FunctionChoice(Body):
    type: Literal["function"]
    name: str
    namespace: str | None = None


def qualified_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


class ResponsesRequest(Generation):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, str] = Field(default_factory=dict)
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    tools: OfferedTools = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    include: list[str] = Field(default_factory=list, max_length=64)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_fields(self) -> ResponsesRequest:
        # The response repeats these fields. The input is checked when it becomes messages.
        if not is_unicode(json.dumps(self.model_dump(exclude={"input"}), ensure_ascii=False)):
            raise ValueError("a text has half a surrogate pair, which is no character")
        return self

    @property
    def functions(self) -> dict[str, tuple[str | None, FunctionTool]]:
        """The functions with their namespaces, by the name that the model sees."""
        groups = [
            (tool.name, tool.tools) if isinstance(tool, Namespace) else (None, [tool])
            for tool in self.tools
        ]
        return {
            qualified_name(name, tool.name): (name, tool)
            for name, tools in groups
            for tool in tools
        }

    def chat(self, messages: list[blocks.MessageFields]) -> ChatRequest:
        """Convert to a chat request with these messages. Raises APIError."""
        tools = [
            blocks.function_tool(name, tool.description, tool.parameters, strict=tool.strict)
            for name, (_, tool) in self.functions.items()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = blocks.named_tool(qualified_name(choice.namespace, choice.name))
        logprobs = _LOGPROBS in self.include or self.top_logprobs > 0
        text_format = self.text.format
        response_format: Any = {"type": text_format.type}
        if text_format.type == "json_schema":
            schema = text_format.model_dump(exclude={"type"}, by_alias=True)
            response_format["json_schema"] = schema
        fields = {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs if logprobs else None,
            "tools": tools or None,
            "tool_choice": choice if tools or choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "response_format": self.response_format or response_format,
        }
        request = blocks.to_chat_request(self, fields, "input")
        return request if self.response_format else request.with_format_name("text.format")


# -- converting items to messages ------------------------------------------------------------------


def messages_from_items(
    items: str | list[OutputItem], find_item: Callable[[str], OutputItem | None]
) -> list[blocks.MessageFields]:
    """Convert input items to messages; ``find_item`` resolves references. Raises APIError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[blocks.MessageFields] = []
    for number, item in enumerate(items):
        with blocks.errors_at(f"input.{number}"):
            if item.get("type") == "item_reference":
                item_id = str(item.get("id"))
                stored = find_item(item_id)
                if stored is None:
                    raise ValueError(
                        f"there is no stored item {item_id[:80]!r}; send the item itself"
                    )
                item = stored
            _add_item(item, messages)
    return messages


def _assistant_message(messages: list[blocks.MessageFields]) -> blocks.MessageFields:
    """The assistant's last message, or a new one: an answer's items become one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_item(item: OutputItem, messages: list[blocks.MessageFields]) -> None:
    """Add an item of an input to the messages. Raises KeyError and ValueError."""
    match item.get("type", "message"):
        case "message":
            role, text = item["role"], text_of(item["content"])
            last: blocks.MessageFields = {"tool_calls": ()}
            if role == "assistant":
                last = _assistant_message(messages)
            if "tool_calls" in last:
                messages.append({"role": role, "content": text})
            else:
                last["content"] = (last["content"] or "") + (text or "")
        case "function_call":
            identifier = str(item.get("call_id") or item.get("id") or "")
            name = qualified_name(item.get("namespace"), item["name"])
            call = new_tool_call(name, item.get("arguments") or "{}", identifier)
            _assistant_message(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            result = {"content": text_of(item["output"]), "tool_call_id": item["call_id"]}
            messages.append({"role": "tool", **result})
        case "reasoning":
            reasoning = text_of(item.get("content")) or text_of(item.get("summary"))
            if reasoning:
                message = {"role": "assistant", "content": "", "reasoning_content": reasoning}
                messages.append(message)
        case kind:
            raise ValueError(f"items of type {str(kind)[:40]!r} are not supported")
