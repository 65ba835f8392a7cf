"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: requests become chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response
from pydantic import Field

from paceline.request.validation import text_of
from paceline.server.api import blocks
from paceline.server.api.chat import Dialogue, render_request
from paceline.server.api.protocol import ChatRequest, Generation
from paceline.server.api.tools import call_of
from paceline.server.errors import anthropic_body
from paceline.server.failures import APIError
from paceline.server.fields import Body, Content
from paceline.server.requestlog import new_id, note
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ClaudeTool(Body):
    """A function. Tools that Anthropic's servers run are not supported."""

    _ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "strict"}
    )
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


# Without those that Anthropic's servers run.
ClaudeTools = Annotated[
    list[ClaudeTool],
    blocks.without_hosted(
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
        """The same request as a chat. Raises APIError."""
        if self.thinking is not None and self.thinking.type != "disabled":
            note("thinking")
        messages: list[blocks.MessageFields] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.messages):
            messages += _messages_of_turn(turn, number)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1]["prefix"] = True
        config = self.output_config or OutputConfig()
        fields = {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": [*self.stop, *self.stop_sequences],
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": config.effort,
            "response_format": self.response_format,
        }
        form = config.format or self.output_format
        if form is not None:
            schema = {"schema": form.schema_}
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        return blocks.as_chat(self, fields | self._tools(), "messages")

    def _tools(self) -> dict[str, Any]:
        """The tool fields of the chat."""
        tools = [
            blocks.function_tool(tool.name, tool.description, tool.input_schema)
            for tool in self.tools
        ]
        if not tools or self.tool_choice is None:
            return {"tools": tools or None}
        asked = self.tool_choice
        choice: Any = {"any": "required", "tool": blocks.named_tool(asked.name or "")}
        return {
            "tools": tools,
            "tool_choice": choice.get(asked.type, asked.type),
            "parallel_tool_calls": not asked.disable_parallel_tool_use,
        }


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)


def _messages_of_turn(turn: Turn, number: int) -> Iterator[blocks.MessageFields]:
    """The messages of one turn: each tool result is one, then the rest. Raises APIError."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    text, message = "", blocks.MessageFields(role=turn.role)
    for index, block in enumerate(turn.content):
        with blocks.reading(f"messages.{number}.content.{index}"):
            kind = block.get("type")
            if kind == "tool_result":
                result = text_of(block.get("content")) or ("error" if block.get("is_error") else "")
                yield {"role": "tool", "content": result, "tool_call_id": block["tool_use_id"]}
            elif kind == "tool_use":
                call = call_of(block["name"], json.dumps(block["input"]), str(block["id"]))
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
        dialogue = await Dialogue.begin(service, body.chat())
        return await respond_with(MessagesAnswer(dialogue), dialogue.ticket, http, body.stream)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        service.check_model(body.model)
        ids = await asyncio.to_thread(render_request, service.tokenizer, body.chat())
        return {"input_tokens": len(ids)}


class MessagesAnswer(blocks.BlocksAnswer):
    """Blocks of text and of tool uses, whose input is parsed at the end."""

    def __init__(self, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._id = dialogue.body.request_id or new_id("msg_")
        self._input = ""  # of the open call, so far

    # -- the whole -----------------------------------------------------------------------------

    def _result(self) -> Chunk:
        return {**self._message(), **self._end(), "usage": self._usage(), **self.receipt}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._dialogue.body.model or self._service.model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """``input_tokens`` leaves out those read from the cache."""
        cached = written = 0
        if self._done is not None:
            cached, written = self._done.stats.cached_tokens, len(self._done.token_ids)
        return {
            "input_tokens": len(self._dialogue.prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": written,
        }

    def _end(self) -> dict[str, Any]:
        stop = self._stop_string() if self._reason == "stop" else None
        reason = _REASONS.get(self._reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}

    def _stop_string(self) -> str | None:
        """The stop string that ended the text: the one with which its tokens go on."""
        stops, done = self._dialogue.body.stop, self._done
        if not stops or done is None:
            return None
        # With a token of the prompt before: decoders treat the beginning of a text differently.
        lead = self._dialogue.prompt[-1:]
        decode = self._service.tokenizer.decode
        text = str(decode([*lead, *done.token_ids]))
        rest = text[text.find(done.text, len(str(decode(lead)))) + len(done.text) :]
        return max((stop for stop in stops if rest.startswith(stop)), key=len, default=None)

    # -- events --------------------------------------------------------------------------------

    def _at(self, kind: str, **fields: Any) -> Chunk:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _opening(self) -> Iterator[Chunk]:
        yield {"type": "message_start", "message": {**self._message(), "content": []}}
        yield {"type": "ping"}

    def closing(self) -> list[Chunk]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: APIError) -> Chunk:
        return anthropic_body(error)

    def _new_text(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def _new_call(self, call: str, name: str) -> dict[str, Any]:
        identifier = call.replace("call_", "toolu_")
        return {"type": "tool_use", "id": identifier, "name": name, "input": {}}

    def _started(self, block: dict[str, Any]) -> Iterator[Chunk]:
        yield self._at("content_block_start", content_block=dict(block))

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Chunk]:
        self._blocks[-1]["text"] += text
        yield self._at("content_block_delta", delta={"type": "text_delta", "text": text})

    def _add_arguments(self, piece: str) -> Iterator[Chunk]:
        self._input += piece
        delta = {"type": "input_json_delta", "partial_json": piece}
        yield self._at("content_block_delta", delta=delta)

    def _ended(self, block: dict[str, Any], cut: bool) -> Iterator[Chunk]:
        if not self._is_text(block):
            block["input"], self._input = _object(self._input), ""
        yield self._at("content_block_stop")


def _object(text: str) -> dict[str, Any]:
    """A call's input; {} where it was cut off."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
