"""``POST /v1/completions``."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from paceline.server.choices import (
    LogprobColumns,
    Origins,
    drafter_of,
    speculation_stats,
    usage,
)
from paceline.server.errors import APIError
from paceline.server.loop import Ticket
from paceline.server.params import sampling_params
from paceline.server.protocol import CompletionRequest, Speculation
from paceline.server.service import Service, events_of, gather
from paceline.server.sse import event_stream

if TYPE_CHECKING:
    from paceline.completion import Completion
    from paceline.llm import Prompt

MAX_PROMPTS = 64


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        prompts = [await service.encode(prompt) for prompt in as_prompts(body.prompt)]
        room = min(service.room(len(prompt), "prompt") for prompt in prompts)
        wish = body.speculation or Speculation()
        logprobs = 0 if body.logprobs is None and wish.tokens else body.logprobs
        limit = room if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, limit, logprobs, service.llm.drafters)
        ticket = await service.submit(prompts, params, body.deadline)
        answer = _Answer(service, body, ticket, prompts)
        if body.stream:
            return event_stream(answer.chunks(), ticket)
        return JSONResponse(answer.whole(await gather(ticket, http)))

    return routes


def as_prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """One prompt or several, as text or token ids. Raises APIError."""
    prompts: list[Any] = list(given) if isinstance(given, list) else [given]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise APIError(
            f"{len(prompts)} prompts in one request; send 1 to {MAX_PROMPTS}", param="prompt"
        )
    if not all(prompts):
        raise APIError("a prompt is empty; give at least one token of text", param="prompt")
    return prompts


class _Answer:
    """The response to one request, whole or in chunks."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, prompts: list[list[int]]
    ) -> None:
        self._service, self._body, self._ticket = service, body, ticket
        self._prompt_tokens = sum(map(len, prompts))
        self._prompts = [prompt for prompt in prompts for _ in range(body.n)]  # of every choice
        self._tokenizer = service.llm.tokenizer
        self._wish = body.speculation or Speculation()
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": service.now(),
            "model": service.model,
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for place, completion in enumerate(completions):
            logprobs = None
            if self._body.logprobs is not None:
                entries = completion.logprobs or []
                logprobs = LogprobColumns(self._tokenizer, self._prompts[place]).columns(entries)
            choice = self._choice(place, completion.text, completion.finish_reason, logprobs)
            if self._wish.tokens:
                choice["tokens"] = Origins(self._tokenizer, self._prompts[place]).records(
                    completion.token_ids,
                    completion.draft_mask,
                    completion.logprobs,
                    completion.finish_reason,
                )
            choices.append(choice)
        answer = {**self._frame, "choices": choices}
        answer["usage"] = usage(self._prompt_tokens, completions)
        if self._wish.stats:
            answer["speculation"] = self._stats(completions)
        return answer

    def _choice(
        self, place: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _stats(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        drafters = self._service.llm.drafters
        return [
            speculation_stats(completion, drafter_of(request, drafters))
            for completion, request in zip(completions, self._ticket.requests, strict=True)
        ]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        columns = [LogprobColumns(self._tokenizer, prompt) for prompt in self._prompts]
        origins = [Origins(self._tokenizer, prompt) for prompt in self._prompts]
        done: dict[int, Completion] = {}
        options = self._body.stream_options
        counted = options is not None and options.include_usage
        async for event in events_of(self._ticket):
            place = event.request * self._body.n + event.index
            logprobs = None
            if self._body.logprobs is not None and event.logprobs is not None:
                logprobs = columns[place].columns(event.logprobs)
            reason = None
            if event.completion is not None:
                done[place] = event.completion
                reason = event.completion.finish_reason
            choice = self._choice(place, event.text, reason, logprobs)
            if self._wish.tokens:
                choice["tokens"] = origins[place].records(
                    event.token_ids, event.from_draft, event.logprobs, reason
                )
            if event.text or reason or logprobs or self._wish.tokens:
                chunk = {**self._frame, "choices": [choice]}
                yield {**chunk, "usage": None} if counted else chunk
        completions = [done[place] for place in sorted(done)]
        if self._wish.stats:
            stats = self._stats(completions)
            yield {**self._frame, "choices": [], "speculation": stats}
        if counted:
            totals = usage(self._prompt_tokens, completions)
            yield {**self._frame, "choices": [], "usage": totals}
