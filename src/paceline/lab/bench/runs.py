"""What a timed run gives back, and what every engine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.params import SamplingParams


@dataclass(frozen=True)
class Ask:
    """One request: a prompt's token ids, and how to go on from it."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class TimedAnswer:
    """New tokens, and when they came: ``(seconds since the request was sent, tokens)``.

    ``written``: how many its engine counted, where the ids are those of a text read again.
    """

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    written: int | None = None

    @property
    def count(self) -> int:
        return len(self.tokens) if self.written is None else self.written


@dataclass(frozen=True)
class TimedRun:
    """One timed run over some requests, answers in their order. Times in seconds.

    ``steps`` counts target forwards that yielded tokens, per request. ``drafted`` (nodes) and
    ``levels`` (depths of the trees) are None where an engine does not say. ``reached`` and
    ``accepted_at`` count drafts by position, as in CompletionStats. ``phases`` are the seconds by
    phase of the ``decoding_steps``: the engine's steps in which nobody read a prompt.
    ``decoding_slots`` are the sequences in them, added up.
    """

    answers: Sequence[TimedAnswer]
    seconds: float
    steps: int
    drafted: int | None = None
    levels: int | None = None
    accepted: int = 0
    reached: Sequence[int] = ()
    accepted_at: Sequence[int] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    decoding_steps: int = 0
    decoding_slots: int = 0

    @classmethod
    def of_deliveries(cls, answers: Sequence[TimedAnswer], seconds: float) -> TimedRun:
        """Of an engine that says nothing but its deliveries: each is one target step."""
        steps = sum(len(answer.arrivals) for answer in answers)
        tokens = sum(answer.count for answer in answers)
        return cls(answers, seconds, steps, accepted=tokens - steps)

    @property
    def tokens(self) -> int:
        return sum(answer.count for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class BenchEngine(Protocol):
    """Something that answers requests; what is to be compared."""

    name: str

    def refresh(self) -> None:
        """Forget what earlier requests taught it: a round begins, with the same prompts."""
        return

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Answer all, from reading the prompts on; timed."""
        ...
