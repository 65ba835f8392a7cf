"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``. Requests are converted to
``ChatRequest``, answers to Anthropic's content blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response
from pydantic import Field

from paceline.core.params import MAX_STOPS
from paceline.request.validation import text_of
from paceline.server.api import blocks
from paceline.server.api.chat import SubmittedChat, parse_arguments, render
from paceline.server.api.protocol import ChatRequest, Generation
from paceline.server.api.tools import new_tool_call
from paceline.server.errors import anthropic_body
from paceline.server.failures import APIError
from paceline.server.fields import Body, Content
from paceline.server.requestlog import new_id
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ClaudeTool(Body):
    """A function that the client runs. Tools that Anthropic's servers run are not supported."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


# The tools of a request, without those that Anthropic's servers would run.
ClaudeTools = Annotated[
    list[ClaudeTool],
    blocks.drop_hosted_tools(
        "web_search", "web_fetch", "code_execution", "mcp_toolset", "tool_search_tool"
    ),
]


class ClaudeChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountRequest(Generation):
    """A request to count prompt tokens: that of a message, but ``max_tokens`` is optional."""

    messages: list[Turn] = Field(min_length=1)
    system: Content | None = None
    tools: ClaudeTools = Field(default_factory=list, max_length=128)
    tool_choice: ClaudeChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] = Field(default_factory=list, max_length=MAX_STOPS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def chat(self) -> ChatRequest:
        """Convert to a chat request. Raises APIError."""
        thinking, variables = self.thinking, self.chat_template_kwargs
        thinks = thinking is not None and thinking.type != "disabled"
        if thinking is not None:
            variables = {"enable_thinking": thinks, **variables}
        messages: list[blocks.MessageFields] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.messages):
            messages += _messages_of_turn(turn, number)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1]["prefix"] = True
        config = self.output_config or OutputConfig()
        fields: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": [*self.stop, *self.stop_sequences],
            "chat_template_kwargs": variables,
            "reasoning_effort": config.effort,
            "response_format": self.response_format,
            "include_reasoning": thinks,  # clients that do not ask for thoughts expect text first
        }
        output_format, name = config.format or self.output_format, "response_format"
        if output_format is not None:
            name = "output_format" if config.format is None else "output_config.format"
            schema = {"schema": output_format.schema_}
            fields["response_format"] = {"type": output_format.type, "json_schema": schema}
        if self.tools:
            fields["tools"] = [
                blocks.function_tool(tool.name, tool.description, tool.input_schema)
                for tool in self.tools
            ]
        if self.tools and (choice := self.tool_choice) is not None:
            converted: Any = {"any": "required", "tool": blocks.named_tool(choice.name or "")}
            fields["tool_choice"] = converted.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return blocks.to_chat_request(self, fields, "messages").with_format_name(name)


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)


def _messages_of_turn(turn: Turn, number: int) -> Iterator[blocks.MessageFields]:
    """The chat messages of a turn: one per tool result, then one of all else. Raises APIError."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    text, message = "", blocks.MessageFields(role=turn.role)
    for index, block in enumerate(turn.content):
        with blocks.errors_at(f"messages.{number}.content.{index}"):
            kind = block.get("type")
            if kind == "tool_result":
                result = text_of(block.get("content")) or ("error" if block.get("is_error") else "")
                yield {"role": "tool", "content": result, "tool_call_id": block["tool_use_id"]}
            elif kind == "tool_use":
                call = new_tool_call(block["name"], json.dumps(block["input"]), str(block["id"]))
                message.setdefault("tool_calls", []).append(call)
            elif kind == "thinking":
                message["reasoning_content"] = str(block.get("thinking") or "")
            else:
                text += text_of([block]) or ""
    if text or len(message) > 1:
        yield {**message, "content": text}


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", response_model=None)
    async def answer(body: MessagesRequest, http: HTTPRequest) -> Response:
        chat = await SubmittedChat.submit(service, body.chat())
        return await respond_with(MessagesAnswer(chat), chat.ticket, http, body.stream)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        service.check_model(body.model)
        ids = await asyncio.to_thread(render, service.tokenizer, body.chat())
        return {"input_tokens": len(ids)}


class MessagesAnswer(blocks.BlocksAnswer):
    """An answer of thinking, text and tool use blocks."""

    def __init__(self, chat: SubmittedChat) -> None:
        super().__init__(chat)
        self._id = chat.body.request_id or new_id("msg_")

    def _result(self) -> Chunk:
        return {**self._message(), **self._stop_fields(), "usage": self._usage(), **self.receipt}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.body.model or self._service.model,
            "content": list(map(self._content, self._blocks)),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """The token counts; ``input_tokens`` leaves out tokens found in the prefix cache."""
        cached = output_tokens = 0
        if self._completion is not None:
            cached = self._completion.stats.cached_tokens
            output_tokens = len(self._completion.token_ids)
        return {
            "input_tokens": len(self._chat.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _stop_fields(self) -> dict[str, Any]:
        stop = self._completion and self._completion.stop_string
        reason = _REASONS.get(self._reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}

    def _first_events(self) -> Iterator[Chunk]:
        yield {"type": "message_start", "message": self._message()}
        yield {"type": "ping"}

    def final_chunks(self) -> list[Chunk]:
        delta = {"type": "message_delta", "delta": self._stop_fields(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def error_chunk(self, error: APIError) -> Chunk:
        return anthropic_body(error)

    def _content(self, block: blocks.AnswerBlock) -> dict[str, Any]:
        """The content block in Anthropic's format. An input that is not complete is {}."""
        if block.is_thought:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        if not block.call_id:
            return {"type": "text", "text": block.text}
        value, identifier = parse_arguments(block.text), block.call_id.replace("call_", "toolu_")
        fields = {"name": block.name, "input": value if isinstance(value, dict) else {}}
        return {"type": "tool_use", "id": identifier, **fields}

    def _start_events(self, block: blocks.AnswerBlock) -> Iterator[Chunk]:
        started = self._content(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": started}

    def _delta_event(self, block: blocks.AnswerBlock, piece: str, logprobs: Any) -> Chunk:
        delta = {"type": "text_delta", "text": piece}
        if block.is_thought:
            delta = {"type": "thinking_delta", "thinking": piece}
        if block.call_id:
            delta = {"type": "input_json_delta", "partial_json": piece}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _end_events(self, block: blocks.AnswerBlock) -> Iterator[Chunk]:
        yield {"type": "content_block_stop", "index": block.index}
