"""OpenAI's ``/v1/completions`` and ``/v1/chat/completions``: answers with ``choices``."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import Response

from paceline.core.params import EMPTY_PROMPT, TokenLogprob
from paceline.request.completion import Completion, StreamEvent
from paceline.server.api.chat import SubmittedChat, sampling_params
from paceline.server.api.choices import (
    LogprobColumns,
    TokenOrigins,
    count_predicted_tokens,
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
from paceline.server.api.tools import Delta, message_from_deltas, parse_event
from paceline.server.client import Ticket
from paceline.server.failures import APIError
from paceline.server.service import Service
from paceline.server.sse import Answer, Chunk, respond_with

_Body = TypeVar("_Body", bound=Generation)


class OpenAIAnswer(Answer, Generic[_Body]):
    """An answer with ``choices``: ``n`` for each prompt, ordered by prompt."""

    def __init__(
        self,
        service: Service,
        body: _Body,
        ticket: Ticket,
        prompts: Sequence[list[int]],
        kind: str,
        prefix: str,
    ) -> None:
        """``kind`` is the field ``object``, ``prefix`` begins the field ``id``."""
        self._ticket, self._body, self._n = ticket, body, ticket.params.n
        self._stream_options = body.stream_options or StreamOptions()
        self._speculation = body.speculation or Speculation()
        self._header = {
            "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": kind,
            "created": service.now(),
            "model": body.model or service.model,
        }
        self._tokenizer = service.tokenizer
        self._prompts = [prompt for prompt in prompts for _ in range(self._n)]  # by choice
        self._params = ticket.params
        self._origins = [
            TokenOrigins(self._tokenizer, prompt, ticket.params)
            for prompt in (self._prompts if self._speculation.tokens else ())
        ]
        self._started: set[int] = set()  # choices that have been sent in part
        self._completions: dict[int, Completion] = {}  # by choice
        self._output_tokens = 0

    def _register(self, event: StreamEvent) -> int:
        """Count an event's tokens and keep its completion; returns the number of its choice."""
        index = event.request * self._n + event.index
        self._output_tokens += len(event.token_ids)
        if event.completion is not None:
            self._completions[index] = event.completion
        return index

    def _token_fields(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """The fields ``tokens``, ``token_ids`` and ``receipt`` of a choice, if requested."""
        fields: dict[str, Any] = {}
        if self._origins:
            fields["tokens"] = self._origins[index].records(event)
        if self._body.return_token_ids:
            fields["token_ids"] = event.token_ids
        if event.completion is not None and event.completion.receipt is not None:
            fields["receipt"] = event.completion.receipt
        return fields

    def complete(self, events: Sequence[StreamEvent]) -> Chunk:
        choices = [self._choice(self._register(event), event) for event in events]
        return {**self._header, "choices": choices, **self._totals(with_usage=True)}

    @abstractmethod
    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """A complete choice."""

    def _totals(self, with_usage: bool) -> Chunk:
        """The fields ``speculation``, if requested, and ``usage``."""
        completions = [self._completions[index] for index in sorted(self._completions)]
        totals: Chunk = {}
        if self._speculation.stats:
            totals["speculation"] = [
                {"drafter": self._ticket.drafter}
                | {name: getattr(completion.stats, name) for name in _SHOWN_STATS}
                for completion in completions
            ]
        if with_usage:
            totals["usage"] = self._usage(completions)
        return totals

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The field ``usage``. A prompt counts once, however many completions it has."""
        usage = self._token_counts(sum(len(completion.token_ids) for completion in completions))
        cached = sum(first.stats.cached_tokens for first in completions[:: self._n])
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        prediction = self._ticket.params.prediction
        if prediction:
            accepted = sum(
                count_predicted_tokens(completion.token_ids, completion.draft_mask, prediction)
                for completion in completions
            )
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": len(completions) * len(prediction) - accepted,
            }
        return usage

    def _token_counts(self, output: int) -> dict[str, Any]:
        prompt = self._ticket.prompt_tokens
        total = prompt + output
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        chunk = {**self._header, "choices": [choice]}
        if self._stream_options.include_usage:
            in_every_chunk = self._stream_options.continuous_usage_stats
            chunk["usage"] = self._token_counts(self._output_tokens) if in_every_chunk else None
        return chunk

    def final_chunks(self) -> list[Chunk]:
        totals = self._totals(self._stream_options.include_usage)
        return [{**self._header, "choices": [], name: value} for name, value in totals.items()]


_SHOWN_STATS = (
    *("drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_accepted_length"),
    *("acceptance_per_position", "target_steps", "not_drafted"),
)


async def _encode(service: Service, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """The token ids of one prompt. Raises APIError."""
    ids = (
        await service.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
    )
    if not prompt or not ids:
        raise APIError(EMPTY_PROMPT, param="prompt")
    return ids


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        service.check_model(body.model)
        prompts = [await _encode(service, body, prompt) for prompt in body.prompt]
        remaining = min(service.remaining(len(prompt), "prompt") for prompt in prompts)
        limit = remaining if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, service.facts.sampling, limit, body.logprobs)
        params = replace(params, prompt_logprobs=body.logprobs if body.echo else None)
        ticket = await service.submit(body, prompts, params)
        answer = CompletionAnswer(service, body, ticket, prompts)
        return await respond_with(answer, ticket, http, body.stream)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HTTPRequest) -> Response:
        chat = await SubmittedChat.submit(service, body)
        return await respond_with(ChatAnswer(chat), chat.ticket, http, body.stream)


class CompletionAnswer(OpenAIAnswer[CompletionRequest]):
    """An answer of the completions API. With ``echo`` a text begins with its prompt."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, prompts: list[list[int]]
    ) -> None:
        super().__init__(service, body, ticket, prompts, "text_completion", "cmpl")
        self._echoed = list(map(self._text_of_prompt, body.prompt)) if body.echo else []
        self._columns = [
            LogprobColumns(
                self._tokenizer,
                prompt,
                body.skip_special_tokens,
                start=len(self._echoed[index // self._n]) if body.echo else 0,
            )
            for index, prompt in enumerate(() if body.logprobs is None else self._prompts)
        ]

    def _text_of_prompt(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        skip = self._body.skip_special_tokens
        return str(self._tokenizer.decode(prompt, skip_special_tokens=skip))

    def feed(self, event: StreamEvent) -> list[Chunk]:
        choice = self._choice(self._register(event), event)
        columns = choice["logprobs"]
        has_output = choice["text"] or choice["finish_reason"] or (columns and columns["tokens"])
        return [self._chunk(choice)] if has_output or len(choice) > 4 else []

    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """What an event adds to its choice. The first one also has the fields of the prompt."""
        first = index not in self._started
        self._started.add(index)
        optional, text = self._token_fields(index, event), event.text
        if first and self._body.return_token_ids:
            optional["prompt_token_ids"] = self._prompts[index]
        if echoed := first and self._body.echo:
            text = self._echoed[index // self._n] + text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, event, echoed),
            "finish_reason": finish_reason(event),
            **optional,
        }

    def _logprobs(self, index: int, event: StreamEvent, echoed: bool) -> dict[str, Any] | None:
        """The columns of the new tokens, after those of the prompt if it is echoed."""
        if self._body.logprobs is None or (event.logprobs is None and not echoed):
            return None
        # With an echoed prompt all tokens are listed, including the one that ended the text.
        entries = event.logprobs or []
        if not self._body.echo:
            entries = visible_logprobs(self._tokenizer, event, self._params)
        columns = self._columns[index].columns(entries)
        if not echoed:
            return columns
        first = TokenLogprob(self._prompts[index][0], 0.0)
        prompt = self._prompt_columns(index, [first, *(event.prompt_logprobs or ())])
        # The first token of a prompt has no log-probability.
        prompt["token_logprobs"][0] = prompt["top_logprobs"][0] = None
        return {name: prompt[name] + column for name, column in columns.items()}

    def _prompt_columns(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The columns of an echoed prompt. Its special tokens are part of it if it was given as
        text, but not the one that the tokenizer puts in front."""
        number = index // self._n
        skip = self._body.skip_special_tokens and not isinstance(self._body.prompt[number], str)
        decoded = self._tokenizer.decode(self._prompts[index], skip_special_tokens=skip)
        start = min(0, len(self._echoed[number]) - len(decoded))
        return LogprobColumns(self._tokenizer, (), skip, start).columns(entries)


class ChatAnswer(OpenAIAnswer[ChatRequest]):
    """An answer of the chat API: choices are messages or, in a stream, deltas of messages."""

    def __init__(self, chat: SubmittedChat) -> None:
        kind = "chat.completion.chunk" if chat.body.stream else "chat.completion"
        super().__init__(chat.service, chat.body, chat.ticket, [chat.prompt], kind, "chatcmpl")
        self._chat, self._parsers = chat, [chat.new_parser() for _ in self._prompts]

    def complete(self, events: Sequence[StreamEvent]) -> Chunk:
        answer = super().complete(events)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompts[0]
        return answer

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        usage = super()._usage(completions)
        if self._chat.marks is not None:
            details = usage.setdefault("completion_tokens_details", {})
            details["reasoning_tokens"] = sum(map(self._chat.reasoning_tokens, self._parsers))
        return usage

    def _choice(self, index: int, event: StreamEvent) -> dict[str, Any]:
        deltas, reason = parse_event(self._parsers[index], event)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **message_from_deltas(deltas)},
            "logprobs": self._logprobs(event),
            "finish_reason": reason,
            **self._token_fields(index, event),
        }

    def _logprobs(self, event: StreamEvent) -> dict[str, Any] | None:
        if not self._body.logprobs or event.logprobs is None:
            return None
        records = token_records(self._tokenizer, event, self._params)
        return {"content": records, "refusal": None}

    def feed(self, event: StreamEvent) -> list[Chunk]:
        index = self._register(event)
        deltas, reason = parse_event(self._parsers[index], event)
        logprobs, token_fields = self._logprobs(event), self._token_fields(index, event)
        if not deltas and (token_fields or (logprobs and logprobs["content"])):
            deltas = [{}]
        choices = [_delta_choice(index, delta) for delta in deltas]
        if choices:
            choices[-1] |= {"logprobs": logprobs, **token_fields}
        if reason is not None:
            choices.append(_delta_choice(index, {}, reason))
        if choices and index not in self._started:
            self._started.add(index)
            choices.insert(0, _delta_choice(index, {"role": "assistant", "content": ""}))
        return [self._chunk(choice) for choice in choices]


def _delta_choice(index: int, delta: Delta, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
