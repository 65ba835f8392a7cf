"""What handlers know of an answer and of the engine: plain data that can cross a socket.

The names are those of ``paceline.request.completion``, whose records these mirror, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paceline.request.defaults import SamplingDefaults
from paceline.request.door import ContextBudget

if TYPE_CHECKING:
    from paceline.core.batch import TokenLogprob
    from paceline.llm import LLM
    from paceline.request import completion


class WireRecord(msgspec.Struct, array_like=True, gc=False):
    """Encoded without its field names: both ends are of one version."""


class LogprobRecord(WireRecord):
    """See ``paceline.core.batch.TokenLogprob``."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Stats(WireRecord):
    """See ``paceline.request.completion.CompletionStats``; what answers show of it."""

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    mean_accepted_length: float
    acceptance_per_position: list[float]
    target_steps: int
    cached_tokens: int = 0
    time_to_first_token: float = 0.0
    seconds: float = 0.0  # to the last token, from its arrival as the first


class CompletionRecord(WireRecord):
    """See ``paceline.request.completion.Completion``."""

    text: str
    token_ids: list[int]
    logprobs: list[LogprobRecord] | None
    finish_reason: str
    draft_mask: list[bool]
    stats: Stats
    lossy: bool
    prompt_logprobs: list[LogprobRecord] | None = None


class Event(WireRecord):
    """What a step added to one text of a ticket; see ``paceline.request.completion.StreamEvent``.

    An answer that is not streamed has one event a text, its completion. ``prompt_logprobs`` come
    with the first event, of the prompt's tokens from the second on.
    """

    ticket: int
    request: int
    index: int
    text: str = ""
    token_ids: list[int] = []
    from_draft: list[bool] = []
    completion: CompletionRecord | None = None
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None


class Facts(WireRecord):
    """What there is to know of an engine by those who do not hold it."""

    context_budget: ContextBudget
    drafters: tuple[str, ...]
    dtype: str
    device: str
    backend: str
    notes: tuple[str, ...] = ()
    max_batch_size: int = 1
    sampling: SamplingDefaults = SamplingDefaults()
    drafts: tuple[str, ...] = ()  # the specs of the drafters

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        return cls(
            llm.context_budget,
            tuple(llm.drafters),
            str(llm.target.dtype).removeprefix("torch."),
            str(llm.target.device),
            llm.target.backend_reason,
            tuple(llm.notes),
            llm.engine.scheduler.config.max_batch_size,
            llm.sampling_defaults,
            tuple(llm.drafts),
        )


def logprobs_of(entries: list[TokenLogprob] | None) -> list[LogprobRecord] | None:
    if entries is None:
        return None
    return [LogprobRecord(entry.token_id, entry.logprob, entry.top) for entry in entries]


def completion_of(done: completion.Completion) -> CompletionRecord:
    stats = done.stats
    *same, _ = Stats.__struct_fields__
    last = stats.arrivals[-1][0] if stats.arrivals else 0.0
    return CompletionRecord(
        done.text,
        done.token_ids,
        logprobs_of(done.logprobs),
        done.finish_reason,
        done.draft_mask,
        Stats(**{name: getattr(stats, name) for name in same}, seconds=last),
        done.lossy,
        logprobs_of(done.prompt_logprobs),
    )


def event_of(ticket: int, event: completion.StreamEvent) -> Event:
    done = event.completion
    return Event(
        ticket,
        event.request,
        event.index,
        event.text,
        event.token_ids,
        event.from_draft,
        None if done is None else completion_of(done),
        logprobs_of(event.logprobs),
    )
