"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from paceline.server.chat_format import render
from paceline.server.choices import (
    Origins,
    speculation_stats,
    token_record,
    usage,
)
from paceline.server.client import Ticket
from paceline.server.params import sampling_params
from paceline.server.protocol import ChatRequest, Speculation
from paceline.server.records import CompletionRecord, Event, LogprobRecord
from paceline.server.service import Service, gather
from paceline.server.sse import Chunk, EventStream
from paceline.server.tool_calls import forced_grammar
from paceline.server.tool_stream import (
    AnswerStream,
    ForcedCall,
    PossibleCall,
    TextAnswer,
    message_of,
)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def answer(body: ChatRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        prompt = await asyncio.to_thread(render, service.tokenizer, body.messages, tools)
        remaining = service.remaining(len(prompt), "messages")
        limit = body.max_completion_tokens or body.max_tokens or remaining
        speculation = body.speculation or Speculation()
        logprobs = (body.top_logprobs or 0) if body.logprobs or speculation.tokens else None
        params = sampling_params(
            body, limit, logprobs, service.drafters, forced_grammar(body), visible=bool(tools)
        )
        ticket = await service.submit([prompt], params, body.deadline, body.stream)
        shown = _Answer(service, body, ticket, prompt)
        if body.stream:
            return EventStream(shown, ticket)
        return JSONResponse(shown.whole(await gather(ticket, http)))

    return routes


class _Answer:
    """The response to one request, whole or in chunks."""

    def __init__(
        self, service: Service, body: ChatRequest, ticket: Ticket, prompt: list[int]
    ) -> None:
        self._service, self._body, self._ticket = service, body, ticket
        self._prompt, self._prompt_tokens = prompt, len(prompt)
        self._tokenizer = service.tokenizer
        self._speculation = body.speculation or Speculation()
        self._may_call = bool(body.tools) and body.tool_choice != "none"
        self._forced = self._may_call and body.tool_choice not in (None, "auto")
        self._parallel = body.parallel_tool_calls is not False
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", service.now()
        # of a stream
        count = ticket.count if body.stream else 0
        self._streams = [self._stream() for _ in range(count)]
        self._sources = [self._origins() for _ in range(count if self._speculation.tokens else 0)]
        self._done: dict[int, CompletionRecord] = {}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model,
        }

    def whole(self, completions: Sequence[CompletionRecord]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            text, reason = completion.text, completion.finish_reason
            message, reason = message_of(self._stream(), text, reason)
            choice = {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **message},
                "logprobs": self._logprobs(completion.logprobs),
                "finish_reason": reason,
            }
            if self._speculation.tokens:
                choice["tokens"] = self._origins().records(
                    completion.token_ids,
                    completion.draft_mask,
                    completion.logprobs,
                    completion.finish_reason,
                )
            choices.append(choice)
        answer = {
            **self._frame("chat.completion"),
            "choices": choices,
            "usage": usage(self._prompt_tokens, completions),
        }
        if self._speculation.stats:
            answer["speculation"] = self._stats(completions)
        return answer

    def _stream(self) -> AnswerStream:
        """What reads one choice's text, whole or in pieces."""
        if not self._may_call:
            return TextAnswer()
        if self._forced:
            return ForcedCall()
        return PossibleCall(self._body.tools or [], self._parallel)

    def _origins(self) -> Origins:
        return Origins(self._tokenizer, self._prompt, visible=self._may_call)

    def _logprobs(self, entries: Sequence[LogprobRecord] | None) -> dict[str, Any] | None:
        if not self._body.logprobs or entries is None:
            return None
        return {"content": [token_record(self._tokenizer, e) for e in entries], "refusal": None}

    def _stats(self, completions: Sequence[CompletionRecord]) -> list[dict[str, Any]]:
        return [speculation_stats(found, self._ticket.drafter) for found in completions]

    # -- streaming -----------------------------------------------------------------------------

    def opening(self) -> list[Chunk]:
        roles = range(self._ticket.count)
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in roles]

    def feed(self, event: Event) -> list[Chunk]:
        index, reason = event.index, None
        deltas = self._streams[index].feed(event.text)
        if event.completion is not None:
            self._done[index] = event.completion
            rest, reason = self._streams[index].finish(event.completion.finish_reason)
            deltas = [*deltas, *rest]
        logprobs = self._logprobs(event.logprobs)
        chunks = [self._chunk(index, delta) for delta in deltas]
        if not chunks and (logprobs or self._speculation.tokens):
            chunks.append(self._chunk(index, {}))
        if chunks and logprobs:
            chunks[-1]["choices"][0]["logprobs"] = logprobs
        if chunks and self._speculation.tokens:
            chunks[-1]["choices"][0]["tokens"] = self._sources[index].records(
                event.token_ids,
                event.from_draft,
                event.logprobs,
                None if event.completion is None else event.completion.finish_reason,
            )
        if reason is not None:
            chunks.append(self._chunk(index, {}, reason))
        return chunks

    def closing(self) -> list[Chunk]:
        completions = [self._done[index] for index in sorted(self._done)]
        chunks: list[Chunk] = []
        if self._speculation.stats:
            chunks.append(self._tail(speculation=self._stats(completions)))
        if self._counts:
            chunks.append(self._tail(usage=usage(self._prompt_tokens, completions)))
        return chunks

    @property
    def _counts(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._frame("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self._counts else chunk

    def _tail(self, **fields: Any) -> dict[str, Any]:
        return {**self._frame("chat.completion.chunk"), "choices": [], **fields}
