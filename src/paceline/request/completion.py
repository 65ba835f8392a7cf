"""What a caller gets back: completions, their statistics, and the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.params import TokenLogprob

if TYPE_CHECKING:  # a server's HTTP process reads these records, and has no torch
    from paceline.core.sequence import SequenceState


@dataclass(frozen=True)
class CompletionStats:
    """How a completion was decoded.

    ``acceptance_per_position[i]`` is conditional: of the drafts that had a token to try at
    position i, all earlier ones having been accepted, the share whose token was accepted.
    ``reached_per_position[i]`` is how many drafts those were. ``mean_accepted_length`` counts
    tokens per target step, the target's own included. ``time_to_first_token`` is in seconds since
    the request was queued, as are the times in ``arrivals``: one ``(seconds, tokens)`` for every
    step that yielded tokens.
    ``decode_seconds`` is the wall time of the steps the request took part in, prefill included.
    ``drafters``: accepted tokens by the drafter that proposed them. ``not_drafted``: steps without
    a draft by the reason. ``cached_tokens`` of the prompt were in the cache when the request first
    ran.
    ``lossy`` figures come from an engine that was asked for typical acceptance.
    """

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None  # of drafted tokens; None: no draft was tried
    mean_accepted_length: float
    acceptance_per_position: list[float]
    target_steps: int
    decode_seconds: float
    tokens_per_second: float
    lossy: bool = False
    time_to_first_token: float = 0.0
    reached_per_position: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list, repr=False)
    cached_tokens: int = 0
    drafters: dict[str, int] = field(default_factory=dict)
    not_drafted: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, seq: SequenceState, lossy: bool = False) -> CompletionStats:
        counts, generated, seconds = seq.counts, seq.generated, seq.seconds
        arrivals = [(moment - seq.queued, count) for moment, count in seq.arrivals]
        return cls(
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
            mean_accepted_length=generated / counts.target_steps if counts.target_steps else 0.0,
            acceptance_per_position=[
                accepted / reached
                for accepted, reached in zip(counts.accepted_at, counts.reached_at, strict=True)
            ],
            target_steps=counts.target_steps,
            decode_seconds=seconds,
            tokens_per_second=generated / seconds if seconds > 0 else 0.0,
            lossy=lossy,
            time_to_first_token=arrivals[0][0] if arrivals else 0.0,
            reached_per_position=list(counts.reached_at),
            arrivals=arrivals,
            cached_tokens=seq.shared,
            drafters=dict(counts.by_drafter),
            not_drafted=dict(counts.not_drafted),
        )


@dataclass(frozen=True)
class Completion:
    """One finished sequence. ``token_ids`` includes the end token that stopped it, if any.

    ``finish_reason`` is "stop" (end token or stop string), "length", "abort" (it was ended by
    ``AsyncLLM.abort``) or "error" (it failed, ``error`` says in a line why); text and tokens are
    then those it had.
    ``draft_mask[i]`` is true where token i was proposed by the draft. ``index`` counts the n
    completions of a prompt.
    ``lossy`` is true if the engine was asked for typical acceptance: sampled text is then not
    distributed as the target's own.
    ``prompt_logprobs``, if the request asked for them, are of the prompt's tokens but the first.
    """

    prompt: str | list[int]
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str
    index: int
    draft_mask: list[bool]
    stats: CompletionStats
    lossy: bool = False
    error: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to one sequence; the last event of a sequence carries its completion.

    ``request`` is the place of the prompt in the list given to ``stream``. Tokens with
    ``from_draft`` come first, in the order of their positions in the draft. ``logprobs`` has one
    entry a token if the request asked for them; the first event has the ``prompt_logprobs``.
    """

    request: int
    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool]
    completion: Completion | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
