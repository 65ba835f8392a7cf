"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.core.params import TokenLogprob
from paceline.request.completion import StreamEvent
from paceline.server.api.answers import OpenAIAnswer
from paceline.server.api.choices import LogprobColumns, finish_reason, seen
from paceline.server.api.infill import infill
from paceline.server.api.params import sampling_params
from paceline.server.api.protocol import MAX_PROMPTS, CompletionRequest
from paceline.server.client import Ticket
from paceline.server.errors import APIError
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        if not 0 < len(body.prompt) <= MAX_PROMPTS:
            raise APIError(
                f"{len(body.prompt)} prompts in one request; send 1 to {MAX_PROMPTS}",
                param="prompt",
            )
        prompts = [await _prompt(service, body, given) for given in body.prompt]
        remaining = min(service.remaining(len(prompt), "prompt") for prompt in prompts)
        traced = body.speculation is not None and body.speculation.tokens
        scored = body.logprobs is not None or body.best_of not in (None, body.n)
        params = sampling_params(
            body,
            remaining if body.max_tokens is None else max(1, body.max_tokens),
            (body.logprobs or 0) if traced or scored else None,
            service.drafters,
            service.sampling,
        )
        params = replace(params, n=body.best_of or body.n)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
        ticket = await service.submit(prompts, params, body.deadline, body.stream)
        answer = CompletionAnswer(service, body, ticket, prompts)
        return await respond_with(answer, ticket, http, body.stream)

    return routes


async def _prompt(service: Service, body: CompletionRequest, given: str | list[int]) -> list[int]:
    """Token ids of one prompt. Raises APIError."""
    ids = await service.encode(given, body.add_special_tokens) if isinstance(given, str) else given
    if not given or not ids:
        raise APIError("a prompt is empty; give at least one token of text", param="prompt")
    if body.suffix:
        return await asyncio.to_thread(infill, service.tokenizer, ids, body.suffix)
    return ids


class CompletionAnswer(OpenAIAnswer):
    """With texts as choices, which may begin with their prompts (``echo``)."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, prompts: list[list[int]]
    ) -> None:
        names, visible = ("cmpl", "text_completion"), not body.skip_special_tokens
        super().__init__(service, body, ticket, prompts, visible, names)
        self._body = body
        self._columns: dict[int, LogprobColumns] = {}

    def _choices(self, events: Sequence[StreamEvent]) -> Chunk:
        choices = list(map(self._choice, events))
        if self._n > self._body.n:  # the likeliest of each prompt, by their mean log-probability
            groups = [range(first, first + self._n) for first in range(0, len(events), self._n)]
            means = [_mean_logprob(event) for event in events]
            best = [sorted(group, key=lambda at: -means[at])[: self._body.n] for group in groups]
            choices = [choices[at] for group in best for at in group]
        return {"choices": [choice | {"index": at} for at, choice in enumerate(choices)]}

    def feed(self, event: StreamEvent) -> list[Chunk]:
        choice = self._choice(event)
        columns = choice["logprobs"]
        shown = choice["text"] or choice["finish_reason"] or (columns and columns["tokens"])
        return [self._chunk(choice)] if shown or len(choice) > 4 else []

    def _choice(self, event: StreamEvent) -> dict[str, Any]:
        """What an event adds to its choice, of which the first has the prompt if it is wanted."""
        if self._body.max_tokens == 0:
            event = _unwritten(event)
        index = self._index(event)
        first = index not in self._begun
        self._begun.add(index)
        more = self._of_tokens(index, event)
        if first:
            more |= self._prompt_scores(event.prompt_logprobs)
        if first and self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompts[index // self._n]
        echoed = first and self._body.echo
        return {
            "index": index,
            "text": self._prompt_text(index) + event.text if echoed else event.text,
            "logprobs": self._logprobs(index, event, echoed),
            "finish_reason": finish_reason(event),
            **more,
        }

    def _logprobs(self, index: int, event: StreamEvent, echoed: bool) -> dict[str, Any] | None:
        """The columns of tokens that were written, behind those of the prompt if it is echoed."""
        if self._body.logprobs is None or (event.logprobs is None and not echoed):
            return None
        prompt = self._prompts[index // self._n]
        # Who has the prompt echoed counts tokens: the one that ends the text is among them.
        entries = (event.logprobs or []) if self._body.echo else seen(self._tokenizer, event)
        if echoed:
            entries = [TokenLogprob(prompt[0], 0.0), *(event.prompt_logprobs or ()), *entries]
        if index not in self._columns:
            self._columns[index] = LogprobColumns(self._tokenizer, () if echoed else prompt)
        columns = self._columns[index].columns(entries)
        if echoed:  # nothing says how likely a prompt's first token is
            columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return columns

    def _prompt_text(self, index: int) -> str:
        given = self._body.prompt[index // self._n]
        if isinstance(given, str):
            return given
        skip = self._body.skip_special_tokens
        return str(self._tokenizer.decode(given, skip_special_tokens=skip))


def _mean_logprob(event: StreamEvent) -> float:
    values = [entry.logprob for entry in event.logprobs or ()]
    return sum(values) / len(values) if values else 0.0


def _unwritten(event: StreamEvent) -> StreamEvent:
    """Of a request for no tokens: the engine writes one, and it is dropped."""
    done = event.completion
    if done is not None:
        done = replace(done, text="", token_ids=[], draft_mask=[], finish_reason="length")
    logprobs: list[TokenLogprob] | None = None if event.logprobs is None else []
    return replace(event, text="", token_ids=[], from_draft=[], completion=done, logprobs=logprobs)
