"""Requests of OpenAI's ``/v1/responses``, and how they become ``ChatRequest``s."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.core.params import is_unicode
from paceline.request.validation import text_of
from paceline.server.api import blocks
from paceline.server.api.protocol import MAX_LOGPROBS, ChatRequest, Generation, JsonSchema
from paceline.server.api.tools import call_of
from paceline.server.fields import Body
from paceline.server.requestlog import note

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


class FlatTool(Body):
    _ignored: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "async", "defer_loading", "output_schema"}
    )
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Body):
    """Functions in a namespace, which their calls name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FlatTool] = Field(max_length=128)


# Without those that OpenAI's servers run.
OfferedTools = Annotated[
    list[FlatTool | Namespace],
    blocks.without_hosted(
        *("web_search", "file_search", "code_interpreter", "image_generation", "mcp"),
        *("tool_search", "programmatic_tool_calling"),
    ),
]


class FlatChoice(Body):
    type: Literal["function"]
    name: str
    namespace: str | None = None


def named_within(namespace: str | None, name: str) -> str:
    """A function's name as the model sees it."""
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
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    include: list[str] = Field(default_factory=list, max_length=64)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_answer(self) -> ResponsesRequest:
        if self.n != 1:
            raise ValueError("n is 1 here; /v1/chat/completions gives several answers")
        # What the response repeats; in the input messages are checked.
        if not is_unicode(json.dumps(self.model_dump(exclude={"input"}), ensure_ascii=False)):
            raise ValueError("a text has half a surrogate pair, which is no character")
        return self

    @property
    def functions(self) -> dict[str, tuple[str | None, FlatTool]]:
        """Namespace and tool by the name that the model sees."""
        groups = [
            (tool.name, tool.tools) if isinstance(tool, Namespace) else (None, [tool])
            for tool in self.tools
        ]
        return {
            named_within(name, tool.name): (name, tool) for name, tools in groups for tool in tools
        }

    def chat(self, messages: list[blocks.MessageFields]) -> ChatRequest:
        """The same request as a chat with these messages. Raises APIError."""
        for name in self.include:
            if name != _LOGPROBS:
                note(f"include={name[:40]}")
        if self.reasoning.summary is not None:
            note("reasoning.summary")
        if self.request_id is not None:
            note("request_id")
        tools = [
            blocks.function_tool(name, tool.description, tool.parameters, strict=tool.strict)
            for name, (_, tool) in self.functions.items()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = blocks.named_tool(named_within(choice.namespace, choice.name))
        logprobs = _LOGPROBS in self.include or self.top_logprobs > 0
        form = self.text.format
        response_format: Any = {"type": form.type}
        if form.type == "json_schema":
            response_format["json_schema"] = form.model_dump(exclude={"type"}, by_alias=True)
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
        return blocks.as_chat(self, fields, "input")


# -- items to messages -----------------------------------------------------------------------------


def messages_of(
    items: str | list[OutputItem], known: Callable[[str], OutputItem | None]
) -> list[blocks.MessageFields]:
    """The messages of an input's items; ``known`` finds items given by id only. Raises APIError."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[blocks.MessageFields] = []
    for number, item in enumerate(items):
        with blocks.reading(f"input.{number}"):
            kind = item.get("type", "message")
            if kind == "item_reference":
                name = str(item.get("id"))
                stored = known(name)
                if stored is None:
                    raise ValueError(f"no item {name[:80]!r} is kept here; send it as it was")
                item, kind = stored, stored["type"]
            read = _READERS.get(kind) if isinstance(kind, str) else None
            if read is None:
                raise ValueError(f"items of type {str(kind)[:40]!r} are not supported")
            read(item, messages)
    return messages


def _assistant(messages: list[blocks.MessageFields]) -> blocks.MessageFields:
    """The last message if it is the assistant's, else a new one: an answer is one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _read_message(item: OutputItem, messages: list[blocks.MessageFields]) -> None:
    role, text = item["role"], text_of(item["content"])
    if role == "assistant":
        message = _assistant(messages)
        if not message.get("tool_calls"):
            message["content"] = (message["content"] or "") + (text or "")
            return
    messages.append({"role": role, "content": text})


def _read_call(item: OutputItem, messages: list[blocks.MessageFields]) -> None:
    identifier = str(item.get("call_id") or item.get("id") or "")
    name = named_within(item.get("namespace"), item["name"])
    call = call_of(name, item.get("arguments") or "{}", identifier)
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _read_output(item: OutputItem, messages: list[blocks.MessageFields]) -> None:
    content = text_of(item["output"])
    messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})


def _read_thoughts(item: OutputItem, messages: list[blocks.MessageFields]) -> None:
    thoughts = text_of(item.get("content")) or text_of(item.get("summary"))
    if thoughts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})


_READERS: Mapping[str, Callable[[OutputItem, list[blocks.MessageFields]], None]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_thoughts,
}
