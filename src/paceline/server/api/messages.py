"""``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's clients ask them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.server.api.blocks import BlocksAnswer
from paceline.server.api.chat_format import render_request
from paceline.server.api.dialogue import Dialogue
from paceline.server.api.messages_api import CountRequest, MessagesRequest
from paceline.server.errors import APIError, anthropic_body
from paceline.server.requestlog import new_id
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def answer(body: MessagesRequest, http: HTTPRequest) -> Response:
        dialogue = await Dialogue.begin(service, body.chat())
        return await respond_with(MessagesAnswer(dialogue), dialogue.ticket, http, body.stream)

    @routes.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        service.check_model(body.model)
        ids = await asyncio.to_thread(render_request, service.tokenizer, body.chat())
        return {"input_tokens": len(ids)}

    return routes


class MessagesAnswer(BlocksAnswer):
    """Blocks of text, and uses of tools, whose input is an object at the end."""

    def __init__(self, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._id = dialogue.body.request_id or new_id("msg_")
        self._input = ""  # of the open call, as far as it has come

    # -- the whole -----------------------------------------------------------------------------

    def _result(self) -> Chunk:
        return {**self._message(), **self._end(), "usage": self._usage()}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Anthropic counts apart what was read from the cache."""
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
        """The stop string that ended the text: the one that its tokens go on with."""
        stops, done = self._dialogue.body.stop, self._done
        if not stops or done is None:
            return None
        # With one token of the prompt before it, for what a decoder does at a beginning.
        lead = self._dialogue.prompt[-1:]
        decode = self._service.tokenizer.decode
        text = str(decode([*lead, *done.token_ids]))
        rest = text[text.find(done.text, len(str(decode(lead)))) + len(done.text) :]
        return max((stop for stop in stops if rest.startswith(stop)), key=len, default=None)

    # -- events --------------------------------------------------------------------------------

    def _at(self, kind: str, **fields: Any) -> Chunk:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _opening(self) -> list[Chunk]:
        return [
            {"type": "message_start", "message": {**self._message(), "content": []}},
            {"type": "ping"},
        ]

    def closing(self) -> list[Chunk]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: APIError) -> Chunk:
        return anthropic_body(error)

    def _new_text(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def _new_call(self, call: str, name: str) -> dict[str, Any]:
        self._input = ""
        return {
            "type": "tool_use",
            "id": call.replace("call_", "toolu_"),
            "name": name,
            "input": {},
        }

    def _started(self, block: dict[str, Any]) -> list[Chunk]:
        return [self._at("content_block_start", content_block=dict(block))]

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Chunk]:
        self._blocks[-1]["text"] += text
        return [self._at("content_block_delta", delta={"type": "text_delta", "text": text})]

    def _add_arguments(self, piece: str) -> list[Chunk]:
        self._input += piece
        delta = {"type": "input_json_delta", "partial_json": piece}
        return [self._at("content_block_delta", delta=delta)]

    def _ended(self, block: dict[str, Any], cut: bool) -> list[Chunk]:
        if not self._is_text(block):
            block["input"] = _object(self._input)
        return [self._at("content_block_stop")]


def _object(text: str) -> dict[str, Any]:
    """A call's input; none where it was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
