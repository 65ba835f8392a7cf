"""``POST /v1/completions`` and ``/v1/chat/completions``: answers with choices."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.core.params import EMPTY_PROMPT, TokenLogprob
from paceline.request.completion import Completion, StreamEvent
from paceline.server.api.chat import Dialogue, sampling_params
from paceline.server.api.choices import (
    LogprobColumns,
    Origins,
    agreement,
    finish_reason,
    token_records,
    visible_logprobs,
)
from paceline.server.api.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Speculation,
    StreamOptions,
)
from paceline.server.api.tokens import infill
from paceline.server.api.tools import AnswerStream, Delta, deltas_of, message_of
from paceline.server.client import Ticket
from paceline.server.failures import APIError
from paceline.server.service import Service
from paceline.server.sse import Answer, Chunk, respond_with


class OpenAIAnswer(Answer):
    """An answer with ``choices``: ``n`` for each prompt, prompt after prompt."""

    def __init__(
        self,
        service: Service,
        body: Generation,
        ticket: Ticket,
        prompts: Sequence[list[int]],
        visible: bool,
        names: tuple[str, str],
    ) -> None:
        """``visible``: special tokens are part of the text. ``names``: of the id, and the kind."""
        self._ticket, self._generation, self._n = ticket, body, ticket.params.n
        self._usage_asked = body.stream_options or StreamOptions()
        self._tokenizer, self._prompts, self._visible = service.tokenizer, prompts, visible
        self._speculation = body.speculation or Speculation()
        self._header = {
            "id": f"{names[0]}-{body.request_id or uuid.uuid4().hex}",
            "object": names[1],
            "created": service.now(),
            "model": body.model or service.model,
        }
        self._origins: dict[int, Origins] = {}
        self._begun: set[int] = set()
        self._done: dict[int, Completion] = {}
        self._written = 0

    def _index(self, event: StreamEvent) -> int:
        """The choice that an event belongs to; counts its tokens and keeps its completion."""
        index = event.request * self._n + event.index
        self._written += len(event.token_ids)
        if event.completion is not None:
            self._done[index] = event.completion
        return index

    def _of_tokens(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """``tokens``, ``token_ids`` and ``receipt`` of a choice, if asked for."""
        fields: dict[str, Any] = {}
        if self._speculation.tokens:
            if index not in self._origins:
                prompt = self._prompt(index)
                self._origins[index] = Origins(self._tokenizer, prompt, self._visible)
            fields["tokens"] = self._origins[index].records(event)
        if self._generation.return_token_ids:
            fields["token_ids"] = event.token_ids
        if event.completion is not None and event.completion.receipt is not None:
            fields["receipt"] = event.completion.receipt
        return fields

    def _prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a choice."""
        return self._prompts[index // self._n]

    # -- the whole -----------------------------------------------------------------------------

    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        choices = [self._choice(self._index(event), event) for event in events]
        return {**self._header, "choices": choices, **self._totals(counts=True)}

    @abstractmethod
    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """A whole choice."""

    def _totals(self, counts: bool) -> Chunk:
        """``speculation`` and, with ``counts``, ``usage``."""
        completions = [self._done[index] for index in sorted(self._done)]
        totals: Chunk = {}
        if self._speculation.stats:
            totals["speculation"] = [
                {"drafter": self._ticket.drafter}
                | {name: getattr(done.stats, name) for name in _SHOWN_STATS}
                for done in completions
            ]
        if counts:
            totals["usage"] = self._usage(completions)
        return totals

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """A prompt counts once, however many completions it has."""
        usage = self._counts(sum(len(done.token_ids) for done in completions))
        cached = sum(done.stats.cached_tokens for done in completions[:: self._n])
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        expected = self._ticket.params.prediction
        if expected:
            agreed = sum(agreement(x.token_ids, x.draft_mask, expected) for x in completions)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": agreed,
                "rejected_prediction_tokens": len(completions) * len(expected) - agreed,
            }
        return usage

    def _counts(self, written: int) -> dict[str, Any]:
        read = self._ticket.prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    # -- streaming -----------------------------------------------------------------------------

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        chunk = {**self._header, "choices": [choice]}
        if self._usage_asked.include_usage:
            so_far = self._usage_asked.continuous_usage_stats
            chunk["usage"] = self._counts(self._written) if so_far else None
        return chunk

    def closing(self) -> list[Chunk]:
        totals = self._totals(self._usage_asked.include_usage)
        return [{**self._header, "choices": [], name: value} for name, value in totals.items()]


_SHOWN_STATS = (
    *("drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_accepted_length"),
    *("acceptance_per_position", "target_steps", "not_drafted"),
)


async def _prompt(service: Service, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """Token ids of one prompt. Raises APIError."""
    ids = (
        await service.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
    )
    if not prompt or not ids:
        raise APIError(EMPTY_PROMPT, param="prompt")
    if body.suffix:
        return await asyncio.to_thread(infill, service.tokenizer, ids, body.suffix)
    return ids


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        ticket, prompts = await _begin(service, body)
        answer = CompletionAnswer(service, body, ticket, prompts)
        return await respond_with(answer, ticket, http, body.stream)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HTTPRequest) -> Response:
        dialogue = await Dialogue.begin(service, body)
        return await respond_with(ChatAnswer(dialogue), dialogue.ticket, http, body.stream)


async def _begin(service: Service, body: CompletionRequest) -> tuple[Ticket, list[list[int]]]:
    """Submit it; also the token ids of its prompts. Raises APIError and what ``submit`` does."""
    adapter = service.check_model(body.model)
    prompts = [await _prompt(service, body, prompt) for prompt in body.prompt]
    remaining = min(service.remaining(len(prompt), "prompt") for prompt in prompts)
    limit = remaining if body.max_tokens is None else max(1, body.max_tokens)
    best_of = body.best_of or body.n
    logprobs = 0 if body.logprobs is None and best_of > body.n else body.logprobs
    params = sampling_params(body, service.facts, limit, logprobs)
    scored = body.logprobs if body.echo else None
    params = replace(params, n=best_of, prompt_logprobs=scored, lora=adapter)
    return await service.submit(prompts, params, body.deadline, body.stream), prompts


class CompletionAnswer(OpenAIAnswer):
    """Choices are texts, which may begin with their prompts (``echo``)."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, prompts: list[list[int]]
    ) -> None:
        names, visible = ("cmpl", "text_completion"), not body.skip_special_tokens
        super().__init__(service, body, ticket, prompts, visible, names)
        self._body = body
        self._columns: dict[int, LogprobColumns] = {}

    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        answer = super().whole(list(map(self._kept, events)))
        if self._n > self._body.n:
            answer["choices"] = self._likeliest(answer["choices"], events)
        return answer

    def _likeliest(
        self, choices: Sequence[dict[str, Any]], events: Sequence[StreamEvent]
    ) -> list[dict[str, Any]]:
        """Of ``best_of`` choices of each prompt the ``n`` with the highest mean log-probability."""
        logprobs = [[entry.logprob for entry in event.logprobs or ()] for event in events]
        means = [fmean(values or [0.0]) for values in logprobs]
        groups = [range(first, first + self._n) for first in range(0, len(choices), self._n)]
        best = [sorted(group, key=lambda at: -means[at])[: self._body.n] for group in groups]
        kept = [choices[at] for group in best for at in group]
        return [choice | {"index": index} for index, choice in enumerate(kept)]

    def feed(self, event: StreamEvent) -> list[Chunk]:
        kept = self._kept(event)
        choice = self._choice(self._index(kept), kept)
        columns = choice["logprobs"]
        shown = choice["text"] or choice["finish_reason"] or (columns and columns["tokens"])
        return [self._chunk(choice)] if shown or len(choice) > 4 else []

    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """What an event adds to its choice; the first event's also has the prompt's fields."""
        first = index not in self._begun
        self._begun.add(index)
        more = self._of_tokens(index, event)
        if first and self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompt(index)
        echoed = first and self._body.echo
        return {
            "index": index,
            "text": self._prompt_text(index) + event.text if echoed else event.text,
            "logprobs": self._logprobs(index, event, echoed),
            "finish_reason": finish_reason(event),
            **more,
        }

    def _logprobs(self, index: int, event: StreamEvent, echoed: bool) -> dict[str, Any] | None:
        """Columns of the new tokens, after those of the prompt if it is echoed."""
        if self._body.logprobs is None or (event.logprobs is None and not echoed):
            return None
        prompt = self._prompt(index)
        # With an echoed prompt all tokens count, also the one that ended the text.
        entries = (
            (event.logprobs or []) if self._body.echo else visible_logprobs(self._tokenizer, event)
        )
        if echoed:
            entries = [TokenLogprob(prompt[0], 0.0), *(event.prompt_logprobs or ()), *entries]
        if index not in self._columns:
            self._columns[index] = LogprobColumns(self._tokenizer, () if echoed else prompt)
        columns = self._columns[index].columns(entries)
        if echoed:  # a prompt's first token has no log-probability
            columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return columns

    def _kept(self, event: StreamEvent) -> StreamEvent:
        """The event; with ``max_tokens`` 0 without the one token that the engine decodes."""
        if self._body.max_tokens != 0:
            return event
        done = event.completion
        if done is not None:
            nothing: dict[str, Any] = {"text": "", "token_ids": [], "draft_mask": []}
            done = replace(done, **nothing, finish_reason="length", receipt=None)
        logprobs: list[TokenLogprob] | None = None if event.logprobs is None else []
        return replace(
            event, text="", token_ids=[], from_draft=[], completion=done, logprobs=logprobs
        )

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt[index // self._n]
        if isinstance(prompt, str):
            return prompt
        skip = self._body.skip_special_tokens
        return str(self._tokenizer.decode(prompt, skip_special_tokens=skip))


class ChatAnswer(OpenAIAnswer):
    """Choices are messages, in a stream deltas of them."""

    def __init__(self, dialogue: Dialogue) -> None:
        body = dialogue.body
        visible = bool(body.shown_tools) or not body.skip_special_tokens
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        prompts, names = [dialogue.prompt], ("chatcmpl", kind)
        super().__init__(dialogue.service, body, dialogue.ticket, prompts, visible, names)
        self._dialogue, self._body = dialogue, body
        self._streams: dict[int, AnswerStream] = {}

    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        answer = super().whole(events)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._dialogue.prompt
        return answer

    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        deltas, ended = deltas_of(self._dialogue.reader(), event)
        message, reason = self._in_asked_form(message_of(deltas), ended)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": self._logprobs(event),
            "finish_reason": reason,
            **self._of_tokens(index, event),
        }

    def _in_asked_form(self, delta: Delta, reason: str | None = None) -> tuple[Delta, str | None]:
        """Requests with ``functions`` get a ``function_call`` in place of ``tool_calls``."""
        if self._body.functions and delta.get("tool_calls"):
            delta = {name: value for name, value in delta.items() if name != "tool_calls"} | {
                "function_call": delta["tool_calls"][0]["function"]
            }
        if self._body.functions and reason == "tool_calls":
            reason = "function_call"
        return delta, reason

    def _logprobs(self, event: StreamEvent) -> dict[str, Any] | None:
        if not self._body.logprobs or event.logprobs is None:
            return None
        return {"content": token_records(self._tokenizer, event), "refusal": None}

    # -- streaming -----------------------------------------------------------------------------

    def feed(self, event: StreamEvent) -> list[Chunk]:
        index = self._index(event)
        stream = self._streams.setdefault(index, self._dialogue.reader())
        deltas, ended = deltas_of(stream, event)
        logprobs, more = self._logprobs(event), self._of_tokens(index, event)
        if not deltas and (more or (logprobs and logprobs["content"])):
            deltas = [{}]
        choices = [self._delta(index, delta) for delta in deltas]
        if choices:
            choices[-1] |= {"logprobs": logprobs, **more}
        if ended is not None:
            choices.append(self._delta(index, {}, ended))
        if choices and index not in self._begun:
            self._begun.add(index)
            choices.insert(0, self._delta(index, {"role": "assistant", "content": ""}))
        return [self._chunk(choice) for choice in choices]

    def _delta(self, index: int, delta: Delta, reason: str | None = None) -> dict[str, Any]:
        delta, reason = self._in_asked_form(delta, reason)
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
