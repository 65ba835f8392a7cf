"""Requests of Anthropic's ``/v1/messages``, and how they become chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paceline.server.api.blocks import as_chat, own_kind, text_or, without_hosted
from paceline.server.api.content import Content, text_of
from paceline.server.api.protocol import ChatRequest, Generation
from paceline.server.errors import APIError
from paceline.server.fields import Body
from paceline.server.requestlog import note

MessageFields = dict[str, Any]  # those of a ChatMessage


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[dict[str, Any]], text_or("content blocks")]


class ClaudeTool(Body):
    """A function; what Anthropic's own servers would run is not here."""

    _passed_over: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "strict"}
    )
    type: Annotated[Literal["custom"], own_kind("custom", "describe your own")] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


# Without those that Anthropic's own servers run.
ClaudeTools = Annotated[
    list[ClaudeTool],
    without_hosted("web_search", "web_fetch", "code_execution", "mcp_toolset", "tool_search_tool"),
]


class ClaudeChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    @property
    def as_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": {"schema": self.schema_}}


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(Generation):
    messages: list[Turn] = Field(min_length=1)
    system: Content | None = None
    tools: ClaudeTools = Field(default_factory=list, max_length=128)
    tool_choice: ClaudeChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises APIError."""
        if self.thinking is not None and self.thinking.type != "disabled":
            note("thinking")
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            fields for number, turn in enumerate(self.messages) for fields in _turned(turn, number)
        ]
        if turns and turns[-1]["role"] == "assistant":
            turns[-1]["prefix"] = True
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        return as_chat(
            self,
            {
                "messages": [*system, *turns],
                "max_tokens": self.max_tokens,
                "stop": [*self.stop, *self.stop_sequences],
                "chat_template_kwargs": self.chat_template_kwargs,
                "reasoning_effort": config.effort,
                "response_format": self.response_format if form is None else form.as_chat,
                **self._tools(),
            },
            "messages",
        )

    def _tools(self) -> dict[str, Any]:
        """The fields of a chat that are about tools."""
        if not self.tools:
            return {}
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools
        ]
        if self.tool_choice is None:
            return {"tools": tools}
        kind = self.tool_choice.type
        choice: Any = {"any": "required"}.get(kind, kind)
        if kind == "tool":
            choice = {"type": "function", "function": {"name": self.tool_choice.name or ""}}
        parallel = not self.tool_choice.disable_parallel_tool_use
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)


def _turned(turn: Turn, number: int) -> Iterator[MessageFields]:
    """The messages of one turn: results of tools first, each its own. Raises APIError."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    said: list[dict[str, Any]] = []
    own: MessageFields = {"role": turn.role}
    for place, block in enumerate(turn.content):
        try:
            kind = block.get("type")
            if kind == "tool_result":
                yield _result(block)
            elif kind == "tool_use":
                own.setdefault("tool_calls", []).append(_call(block))
            elif kind == "thinking":
                own["reasoning_content"] = str(block.get("thinking") or "")
            else:
                text_of([block])
                said.append(block)
        except (KeyError, ValueError) as error:
            where = f"messages.{number}.content.{place}"
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise APIError(f"{where}: {reason}", param=where) from None
    if said or len(own) > 1:
        yield {**own, "content": text_of(said)}


def _result(block: dict[str, Any]) -> MessageFields:
    content = text_of(block.get("content")) or ""
    if block.get("is_error") and not content:
        content = "error"
    return {"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": str(block["id"]), "type": "function", "function": function}
