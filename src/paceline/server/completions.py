"""``POST /v1/completions``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from paceline.server.choices import (
    LogprobColumns,
    Origins,
    speculation_stats,
    usage,
)
from paceline.server.client import Ticket
from paceline.server.errors import APIError
from paceline.server.params import sampling_params
from paceline.server.protocol import CompletionRequest, Speculation
from paceline.server.records import CompletionRecord, Event
from paceline.server.service import Service, gather
from paceline.server.sse import Chunk, EventStream

MAX_PROMPTS = 64


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        prompts = [await service.encode(prompt) for prompt in as_prompts(body.prompt)]
        remaining = min(service.remaining(len(prompt), "prompt") for prompt in prompts)
        speculation = body.speculation or Speculation()
        logprobs = 0 if body.logprobs is None and speculation.tokens else body.logprobs
        limit = remaining if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, limit, logprobs, service.drafters)
        ticket = await service.submit(prompts, params, body.deadline, body.stream)
        answer = _Answer(service, body, ticket, prompts)
        if body.stream:
            return EventStream(answer, ticket)
        return JSONResponse(answer.whole(await gather(ticket, http)))

    return routes


def as_prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
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
        self._tokenizer = service.tokenizer
        self._speculation = body.speculation or Speculation()
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": service.now(),
            "model": service.model,
        }
        # of a stream that wants them
        shown = self._prompts if body.stream and body.logprobs is not None else []
        traced = self._prompts if body.stream and self._speculation.tokens else []
        self._columns = [LogprobColumns(self._tokenizer, prompt) for prompt in shown]
        self._origins = [Origins(self._tokenizer, prompt) for prompt in traced]
        self._done: dict[int, CompletionRecord] = {}

    def whole(self, completions: Sequence[CompletionRecord]) -> dict[str, Any]:
        choices = []
        for place, completion in enumerate(completions):
            logprobs = None
            if self._body.logprobs is not None:
                entries = completion.logprobs or []
                logprobs = LogprobColumns(self._tokenizer, self._prompts[place]).columns(entries)
            choice = self._choice(place, completion.text, completion.finish_reason, logprobs)
            if self._speculation.tokens:
                choice["tokens"] = Origins(self._tokenizer, self._prompts[place]).records(
                    completion.token_ids,
                    completion.draft_mask,
                    completion.logprobs,
                    completion.finish_reason,
                )
            choices.append(choice)
        answer = {**self._frame, "choices": choices}
        answer["usage"] = usage(self._prompt_tokens, completions)
        if self._speculation.stats:
            answer["speculation"] = self._stats(completions)
        return answer

    def _choice(
        self, place: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _stats(self, completions: Sequence[CompletionRecord]) -> list[dict[str, Any]]:
        return [speculation_stats(found, self._ticket.drafter) for found in completions]

    # -- streaming -----------------------------------------------------------------------------

    def opening(self) -> list[Chunk]:
        return []

    def feed(self, event: Event) -> list[Chunk]:
        place = event.request * self._body.n + event.index
        logprobs = None
        if self._body.logprobs is not None and event.logprobs is not None:
            logprobs = self._columns[place].columns(event.logprobs)
        reason = None
        if event.completion is not None:
            self._done[place] = event.completion
            reason = event.completion.finish_reason
        choice = self._choice(place, event.text, reason, logprobs)
        if self._speculation.tokens:
            choice["tokens"] = self._origins[place].records(
                event.token_ids, event.from_draft, event.logprobs, reason
            )
        if not (event.text or reason or logprobs or self._speculation.tokens):
            return []
        chunk = {**self._frame, "choices": [choice]}
        return [{**chunk, "usage": None} if self._counts else chunk]

    def closing(self) -> list[Chunk]:
        completions = [self._done[place] for place in sorted(self._done)]
        chunks: list[Chunk] = []
        if self._speculation.stats:
            stats = self._stats(completions)
            chunks.append({**self._frame, "choices": [], "speculation": stats})
        if self._counts:
            totals = usage(self._prompt_tokens, completions)
            chunks.append({**self._frame, "choices": [], "usage": totals})
        return chunks

    @property
    def _counts(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage
