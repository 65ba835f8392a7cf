"""What a caller gets back: completions, their statistics, and the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.params import TokenLogprob

if TYPE_CHECKING:  # a server's HTTP process reads these records, and has no torch
    from paceline.core.sequence import SequenceState


@dataclass(frozen=True)
class CompletionStats:
    """How a completion was decoded.

    ``acceptance_per_position[i]``: acceptance rate at draft position i, over the
    ``reached_per_position[i]`` drafts that had a token there and whose earlier positions were all
    accepted. ``mean_accepted_length``: tokens per target step, the target's own token included.
    ``arrivals``: ``(seconds, tokens)`` for each step that yielded tokens, in seconds since the
    request was queued; ``time_to_first_token`` is the first of these. ``decode_seconds``: wall time
    of the request's steps, prefill included. ``drafters``: accepted tokens by drafter.
    ``not_drafted``: steps without a draft, by reason. ``cached_tokens``: prompt tokens found in the
    prefix cache when the request first ran."""

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None  # accepted by drafted tokens; None: nothing was drafted
    mean_accepted_length: float
    acceptance_per_position: list[float]
    target_steps: int
    decode_seconds: float
    tokens_per_second: float
    time_to_first_token: float = 0.0
    reached_per_position: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list, repr=False)
    cached_tokens: int = 0
    drafters: dict[str, int] = field(default_factory=dict)
    not_drafted: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, seq: SequenceState) -> CompletionStats:
        counts, generated, seconds = seq.counts, seq.generated, seq.seconds
        arrivals = [(moment - seq.queued, count) for moment, count in seq.arrivals]
        return cls(
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            acceptance_rate=counts.acceptance_rate,
            mean_accepted_length=generated / counts.target_steps if counts.target_steps else 0.0,
            acceptance_per_position=counts.rates,
            target_steps=counts.target_steps,
            decode_seconds=seconds,
            tokens_per_second=generated / seconds if seconds > 0 else 0.0,
            time_to_first_token=arrivals[0][0] if arrivals else 0.0,
            reached_per_position=list(counts.reached_at),
            arrivals=arrivals,
            cached_tokens=seq.prefix_hit_tokens,
            drafters=dict(counts.by_drafter),
            not_drafted=dict(counts.not_drafted),
        )


@dataclass(frozen=True)
class Completion:
    """One finished sequence. ``token_ids`` include the end token that stopped it, if any.

    ``finish_reason``: "stop" (end token or stop string), "length" or "error" (``error`` says why in
    one line; text and tokens are those decoded before). ``draft_mask[i]``: whether token i was
    proposed by a drafter. ``index``: number of the completion among the ``n`` of a prompt.
    ``prompt_logprobs``: if asked for, those of all prompt tokens but the first. ``receipt``: if
    asked for, the record of an answer that ended with "stop" or "length" (request/receipt.py).
    ``stop_string``: the one that ended the text."""

    prompt: str | list[int]
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str
    index: int
    draft_mask: list[bool]
    stats: CompletionStats
    error: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    receipt: dict[str, Any] | None = None
    stop_string: str | None = None

    @property
    def outputs(self) -> list[Completion]:
        """A list of this completion alone, so that vLLM's ``outputs[0].outputs[0].text`` works."""
        return [self]


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to one sequence. The last event of a sequence has its completion.

    ``request``: index of the prompt in the list given to ``stream``. ``from_draft[i]``: whether
    token i was drafted; in a step, drafted tokens come first. ``drafters[i]``: the name of its
    drafter, "" if it was not drafted. ``logprobs``: one per token, if asked for.
    ``prompt_logprobs``: if asked for, in the first event."""

    request: int
    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool]
    completion: Completion | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    drafters: list[str] = field(default_factory=list)
