"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from paceline.server.chat_format import render
from paceline.server.choices import (
    Origins,
    drafter_of,
    speculation_stats,
    token_record,
    usage,
)
from paceline.server.loop import Ticket
from paceline.server.params import sampling_params
from paceline.server.protocol import ChatRequest, Speculation
from paceline.server.service import Service, events_of, gather
from paceline.server.sse import event_stream
from paceline.server.tool_calls import forced_grammar
from paceline.server.tool_stream import (
    AnswerStream,
    ForcedCall,
    PossibleCall,
    TextAnswer,
    message_of,
)

if TYPE_CHECKING:
    from paceline.completion import Completion
    from paceline.core.batch import TokenLogprob


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def answer(body: ChatRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        prompt = await asyncio.to_thread(render, service.llm.tokenizer, body.messages, tools)
        room = service.room(len(prompt), "messages")
        limit = body.max_completion_tokens or body.max_tokens or room
        wish = body.speculation or Speculation()
        logprobs = (body.top_logprobs or 0) if body.logprobs or wish.tokens else None
        params = sampling_params(
            body, limit, logprobs, service.llm.drafters, forced_grammar(body), visible=bool(tools)
        )
        ticket = await service.submit([prompt], params, body.deadline)
        shown = _Answer(service, body, ticket, prompt)
        if body.stream:
            return event_stream(shown.chunks(), ticket)
        return JSONResponse(shown.whole(await gather(ticket, http)))

    return routes


class _Answer:
    """The response to one request, whole or in chunks."""

    def __init__(
        self, service: Service, body: ChatRequest, ticket: Ticket, prompt: list[int]
    ) -> None:
        self._service, self._body, self._ticket = service, body, ticket
        self._prompt, self._prompt_tokens = prompt, len(prompt)
        self._tokenizer = service.llm.tokenizer
        self._wish = body.speculation or Speculation()
        self._may_call = bool(body.tools) and body.tool_choice != "none"
        self._forced = self._may_call and body.tool_choice not in (None, "auto")
        self._parallel = body.parallel_tool_calls is not False
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", service.now()

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model,
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
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
            if self._wish.tokens:
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
        if self._wish.stats:
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

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._body.logprobs or entries is None:
            return None
        return {"content": [token_record(self._tokenizer, e) for e in entries], "refusal": None}

    def _stats(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        drafters = self._service.llm.drafters
        return [
            speculation_stats(completion, drafter_of(request, drafters))
            for completion, request in zip(completions, self._ticket.requests, strict=True)
        ]

    # -- streaming -----------------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        count = len(self._ticket.requests)
        origins = [self._origins() for _ in range(count)]
        streams = [self._stream() for _ in range(count)]
        done: dict[int, Completion] = {}
        for index in range(count):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for event in events_of(self._ticket):
            index, reason = event.index, None
            deltas = streams[index].feed(event.text)
            if event.completion is not None:
                done[index] = event.completion
                rest, reason = streams[index].finish(event.completion.finish_reason)
                deltas = [*deltas, *rest]
            logprobs = self._logprobs(event.logprobs)
            chunks = [self._chunk(index, delta) for delta in deltas]
            if not chunks and (logprobs or self._wish.tokens):
                chunks.append(self._chunk(index, {}))
            if chunks and logprobs:
                chunks[-1]["choices"][0]["logprobs"] = logprobs
            if chunks and self._wish.tokens:
                chunks[-1]["choices"][0]["tokens"] = origins[index].records(
                    event.token_ids,
                    event.from_draft,
                    event.logprobs,
                    None if event.completion is None else event.completion.finish_reason,
                )
            if reason is not None:
                chunks.append(self._chunk(index, {}, reason))
            for chunk in chunks:
                yield chunk
        completions = [done[index] for index in sorted(done)]
        if self._wish.stats:
            yield self._tail(speculation=self._stats(completions))
        if self._counts:
            yield self._tail(usage=usage(self._prompt_tokens, completions))

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
