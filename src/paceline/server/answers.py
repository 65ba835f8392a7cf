"""What the answers of completions and of chats share: frame, usage, statistics, ids of tokens."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.server.choices import Origins, speculation_stats, usage
from paceline.server.protocol import Generation, Speculation
from paceline.server.sse import Answer, Chunk

if TYPE_CHECKING:
    from paceline.server.client import Ticket
    from paceline.server.records import CompletionRecord, Event, LogprobRecord
    from paceline.server.service import Service


class OpenAIAnswer(Answer):
    """An answer with ``choices``, of which every prompt has ``n``, one after the other."""

    def __init__(
        self,
        service: Service,
        body: Generation,
        ticket: Ticket,
        prompts: Sequence[list[int]],
        visible: bool = False,
    ) -> None:
        """``visible``: special tokens are part of the text."""
        self._service, self._ticket, self._generation = service, ticket, body
        self._tokenizer, self._prompts, self._visible = service.tokenizer, prompts, visible
        self._n = ticket.count // len(prompts)
        self._prompt_tokens = sum(map(len, prompts))
        self._speculation = body.speculation or Speculation()
        self._id = body.request_id or uuid.uuid4().hex
        self._created = service.now()
        # of a stream
        self._sources: dict[int, Origins] = {}
        self._begun: set[int] = set()
        self._done: dict[int, CompletionRecord] = {}
        self._written = 0

    def _frame(self, prefix: str, kind: str) -> Chunk:
        return {
            "id": f"{prefix}-{self._id}",
            "object": kind,
            "created": self._created,
            "model": self._service.model,
        }

    def _place(self, event: Event) -> int:
        """The choice that an event belongs to; counts its tokens."""
        place = event.request * self._n + event.index
        self._written += len(event.token_ids)
        if event.completion is not None:
            self._done[place] = event.completion
        return place

    def _more(
        self,
        place: int,
        tokens: Sequence[int],
        drafted: Sequence[bool],
        logprobs: Sequence[LogprobRecord] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        """What a choice says of its tokens, if the request wants it."""
        more: dict[str, Any] = {}
        if self._speculation.tokens:
            if place not in self._sources:
                prompt = self._prompts[place // self._n]
                self._sources[place] = Origins(self._tokenizer, prompt, self._visible)
            more["tokens"] = self._sources[place].records(tokens, drafted, logprobs, reason)
        if self._generation.return_token_ids:
            more["token_ids"] = list(tokens)
        return more

    def _more_of(self, place: int, done: CompletionRecord) -> dict[str, Any]:
        return self._more(place, done.token_ids, done.draft_mask, done.logprobs, done.finish_reason)

    def _more_of_event(self, place: int, event: Event) -> dict[str, Any]:
        reason = None if event.completion is None else event.completion.finish_reason
        return self._more(place, event.token_ids, event.from_draft, event.logprobs, reason)

    def _usage(self, completions: Sequence[CompletionRecord]) -> dict[str, Any]:
        return usage(self._prompt_tokens, completions, self._n)

    def _totals(self, completions: Sequence[CompletionRecord]) -> Chunk:
        """What a whole answer says after its choices."""
        totals: Chunk = {"usage": self._usage(completions)}
        if self._speculation.stats:
            totals["speculation"] = self._stats(completions)
        return totals

    def _stats(self, completions: Sequence[CompletionRecord]) -> list[dict[str, Any]]:
        return [speculation_stats(found, self._ticket.drafter) for found in completions]

    # -- streaming -----------------------------------------------------------------------------

    def _chunk(self, frame: Chunk, choice: dict[str, Any]) -> Chunk:
        chunk = {**frame, "choices": [choice]}
        if self._generation.counts_on:
            chunk["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._written,
                "total_tokens": self._prompt_tokens + self._written,
            }
        elif self._generation.counts:
            chunk["usage"] = None
        return chunk

    def _tails(self, frame: Chunk) -> list[Chunk]:
        """What follows the last choice."""
        completions = [self._done[place] for place in sorted(self._done)]
        tails: list[Chunk] = []
        if self._speculation.stats:
            tails.append({**frame, "choices": [], "speculation": self._stats(completions)})
        if self._generation.counts:
            tails.append({**frame, "choices": [], "usage": self._usage(completions)})
        return tails
