"""What the answers of completions and of chats share: frame, usage, statistics, ids of tokens."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.server.api.choices import Origins, agreement, finish_reason, prompt_entry
from paceline.server.api.protocol import Generation, Speculation
from paceline.server.sse import Answer, Chunk

if TYPE_CHECKING:
    from paceline.core.params import TokenLogprob
    from paceline.request.completion import Completion, StreamEvent
    from paceline.server.client import Ticket
    from paceline.server.service import Service


class OpenAIAnswer(Answer):
    """An answer with ``choices``, of which every prompt has ``n``, one after the other."""

    def __init__(
        self,
        service: Service,
        body: Generation,
        ticket: Ticket,
        prompts: Sequence[list[int]],
        visible: bool,
        names: tuple[str, str],
    ) -> None:
        """``visible``: special tokens are part of the text. ``names``: what the id begins with, and
        the kind of object."""
        self._service, self._ticket, self._generation = service, ticket, body
        self._tokenizer, self._prompts, self._visible = service.tokenizer, prompts, visible
        self._n = ticket.count // len(prompts)
        self._prompt_tokens = sum(map(len, prompts))
        self._speculation = body.speculation or Speculation()
        self._header = {
            "id": f"{names[0]}-{body.request_id or uuid.uuid4().hex}",
            "object": names[1],
            "created": service.now(),
            "model": service.model,
        }
        self._origins: dict[int, Origins] = {}
        self._begun: set[int] = set()
        self._done: dict[int, Completion] = {}
        self._written = 0

    def _index(self, event: StreamEvent) -> int:
        """The choice that an event belongs to; counts its tokens."""
        index = event.request * self._n + event.index
        self._written += len(event.token_ids)
        if event.completion is not None:
            self._done[index] = event.completion
        return index

    def _of_tokens(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """What a choice says of its tokens, if the request wants it."""
        fields: dict[str, Any] = {}
        if self._speculation.tokens:
            if index not in self._origins:
                prompt = self._prompts[index // self._n]
                self._origins[index] = Origins(self._tokenizer, prompt, self._visible)
            fields["tokens"] = self._origins[index].records(
                event.token_ids, event.from_draft, event.logprobs, finish_reason(event)
            )
        if self._generation.return_token_ids:
            fields["token_ids"] = event.token_ids
        return fields

    def _prompt_scores(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """The prompt's log-probabilities as vLLM shows them, if the request wants them."""
        if self._generation.prompt_logprobs is None:
            return {}
        shown = [prompt_entry(self._tokenizer, entry) for entry in entries or ()]
        return {"prompt_logprobs": [None, *shown]}

    # -- the whole -----------------------------------------------------------------------------

    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        return {**self._header, **self._choices(events), **self._totals(counts=True)}

    @abstractmethod
    def _choices(self, events: Sequence[StreamEvent]) -> Chunk:
        """``choices``, and what else is said of a whole answer."""

    def _totals(self, counts: bool) -> Chunk:
        """What is said of all choices together, of their tokens if ``counts``."""
        completions = [self._done[index] for index in sorted(self._done)]
        totals: Chunk = {}
        if self._speculation.stats:
            totals["speculation"] = [
                {
                    "drafter": self._ticket.drafter,
                    **{name: getattr(done.stats, name) for name in _SHOWN_STATS},
                    "lossy": done.lossy,
                }
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
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }

    # -- streaming -----------------------------------------------------------------------------

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        chunk = {**self._header, "choices": [choice]}
        if self._generation.counts_on:
            chunk["usage"] = self._counts(self._written)
        elif self._generation.counts:
            chunk["usage"] = None
        return chunk

    def closing(self) -> list[Chunk]:
        totals = self._totals(self._generation.counts)
        return [{**self._header, "choices": [], name: value} for name, value in totals.items()]


_SHOWN_STATS = (
    "drafted_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "mean_accepted_length",
    "acceptance_per_position",
    "target_steps",
)
