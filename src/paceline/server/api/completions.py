"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.server.api.answers import OpenAIAnswer
from paceline.server.api.choices import LogprobColumns, seen
from paceline.server.api.infill import infill
from paceline.server.api.params import sampling_params
from paceline.server.api.protocol import MAX_PROMPTS, CompletionRequest
from paceline.server.client import Ticket
from paceline.server.errors import APIError
from paceline.server.records import CompletionRecord, Event, LogprobRecord
from paceline.server.service import Service
from paceline.server.sse import Chunk, respond_with


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        prompts = [await _prompt(service, body, given) for given in _checked(body.prompt)]
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


def _checked(prompts: list[str | list[int]]) -> list[str | list[int]]:
    """Raises APIError for none, too many, or an empty one."""
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise APIError(
            f"{len(prompts)} prompts in one request; send 1 to {MAX_PROMPTS}", param="prompt"
        )
    if not all(prompts):
        raise APIError("a prompt is empty; give at least one token of text", param="prompt")
    return prompts


async def _prompt(service: Service, body: CompletionRequest, given: str | list[int]) -> list[int]:
    """Token ids of one prompt. Raises APIError."""
    ids = given
    if isinstance(given, str):
        ids = await service.encode(given, body.add_special_tokens)
    assert isinstance(ids, list)
    if not ids:
        raise APIError("a prompt is empty; give at least one token of text", param="prompt")
    if body.suffix:
        return await asyncio.to_thread(infill, service.tokenizer, ids, body.suffix)
    return ids


class CompletionAnswer(OpenAIAnswer):
    """With texts as choices, which may begin with their prompts (``echo``)."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, prompts: list[list[int]]
    ) -> None:
        super().__init__(service, body, ticket, prompts, visible=not body.skip_special_tokens)
        self._body = body
        self._header = self._frame("cmpl", "text_completion")
        self._columns: dict[int, LogprobColumns] = {}

    def whole(self, completions: Sequence[CompletionRecord]) -> Chunk:
        if self._body.max_tokens == 0:
            completions = [_unwritten(done) for done in completions]
        choices: list[dict[str, Any]] = []
        for place in self._best(completions):
            done = completions[place]
            text, names = self._prompt_text(place), self._prompt_names(place, done.prompt_logprobs)
            names = _joined(names, self._names(place, done.logprobs, done.finish_reason))
            choice = self._choice(len(choices), text + done.text, done.finish_reason, names)
            choice |= self._more_of(place, done)
            choice |= self._prompt_more(place, done.prompt_logprobs)
            choices.append(choice)
        return {**self._header, "choices": choices, **self._totals(completions)}

    def _best(self, completions: Sequence[CompletionRecord]) -> list[int]:
        """The places of the n likeliest answers of each prompt, by their mean log-probability."""
        ranked = []
        for first in range(0, len(completions), self._n):
            own = list(range(first, min(first + self._n, len(completions))))
            if self._n > self._body.n:
                own.sort(key=lambda place: -_mean_logprob(completions[place]))
            ranked += own[: self._body.n]
        return ranked

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _names(
        self, place: int, entries: Sequence[LogprobRecord] | None, reason: str | None
    ) -> dict[str, Any] | None:
        """The columns of tokens that were written."""
        if self._body.logprobs is None or entries is None:
            return None
        if not self._body.echo:  # who has it echoed counts tokens
            entries = seen(self._tokenizer, entries, reason)
        return self._columns_of(place).columns(entries)

    def _columns_of(self, place: int) -> LogprobColumns:
        if place not in self._columns:
            prompt = [] if self._body.echo else self._prompts[place // self._n]
            self._columns[place] = LogprobColumns(self._tokenizer, prompt)
        return self._columns[place]

    # -- the prompt, for those who want it back ------------------------------------------------

    def _prompt_text(self, place: int) -> str:
        if not self._body.echo:
            return ""
        given = self._body.prompt[place // self._n]
        if isinstance(given, str):
            return given
        skip = self._body.skip_special_tokens
        return str(self._tokenizer.decode(given, skip_special_tokens=skip))

    def _prompt_names(
        self, place: int, entries: Sequence[LogprobRecord] | None
    ) -> dict[str, Any] | None:
        if not self._body.echo or self._body.logprobs is None:
            return None
        return self._columns_of(place).prompt(self._prompts[place // self._n], entries or ())

    def _prompt_more(self, place: int, entries: Sequence[LogprobRecord] | None) -> dict[str, Any]:
        more = self._prompt_scores(entries)
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompts[place // self._n]
        return more

    # -- streaming -----------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Chunk]:
        if self._body.max_tokens == 0:
            event = _unwritten_event(event)
        place, reason, text, names = self._place(event), None, event.text, None
        more = self._more_of_event(place, event)
        if event.completion is not None:
            reason = event.completion.finish_reason
        if place not in self._begun:
            self._begun.add(place)
            text = self._prompt_text(place) + text
            names = self._prompt_names(place, event.prompt_logprobs)
            more |= self._prompt_more(place, event.prompt_logprobs)
        names = _joined(names, self._names(place, event.logprobs, reason))
        if not (text or reason or more or (names and names["tokens"])):
            return []
        return [self._chunk(self._header, {**self._choice(place, text, reason, names), **more})]

    def closing(self) -> list[Chunk]:
        return self._tails(self._header)


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Columns one after the other."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}


def _mean_logprob(done: CompletionRecord) -> float:
    values = [entry.logprob for entry in done.logprobs or ()]
    return sum(values) / len(values) if values else 0.0


def _unwritten(done: CompletionRecord) -> CompletionRecord:
    """Of a request for no tokens: the engine writes one, and it is dropped."""
    logprobs: list[LogprobRecord] | None = None if done.logprobs is None else []
    return msgspec.structs.replace(
        done, text="", token_ids=[], draft_mask=[], logprobs=logprobs, finish_reason="length"
    )


def _unwritten_event(event: Event) -> Event:
    done = None if event.completion is None else _unwritten(event.completion)
    logprobs: list[LogprobRecord] | None = None if event.logprobs is None else []
    return msgspec.structs.replace(
        event, text="", token_ids=[], from_draft=[], logprobs=logprobs, completion=done
    )
