"""One request being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.constraint import Constraint
from paceline.core.params import SamplingParams


@dataclass
class DraftCounts:
    """What speculation did for one sequence; positions count from the first drafted token."""

    target_steps: int = 0  # forwards that yielded tokens (prefill chunks before the last do not)
    drafted: int = 0
    levels: int = 0  # depths of all trees
    accepted: int = 0
    reached_at: list[int] = field(default_factory=list)  # drafts that had a token to try there
    accepted_at: list[int] = field(default_factory=list)

    def record(self, nodes: int, levels: int, accepted: int, reached: int) -> None:
        """Count one verified tree: its nodes, its depth, how much was accepted, how much tried.

        ``reached`` is ``accepted`` plus one if the last accepted node had children to try.
        """
        self.target_steps += 1
        self.drafted += nodes
        self.levels += levels
        self.accepted += accepted
        while len(self.reached_at) < reached:
            self.reached_at.append(0)
            self.accepted_at.append(0)
        for position in range(reached):
            self.reached_at[position] += 1
            self.accepted_at[position] += position < accepted


class TextSink(Protocol):
    """Turns tokens into text while they are committed; knows the stop strings."""

    def push(self, token: int) -> bool:
        """Take one token; true if a stop string is complete, which ends the sequence."""
        ...


@dataclass(eq=False)  # a request is itself, whatever another one holds
class SequenceState:
    """Committed tokens of one request and how many of them have cached keys and values.

    One invariant: ``cached + len(pending) == len(tokens)``. It holds by construction: ``pending``
    is derived. At prefill pending is the prompt, when decoding it is one token.
    """

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end generation
    cached: int = 0
    text: TextSink | None = None
    constraint: Constraint | None = None  # what a grammar allows next
    seconds: float = 0.0  # wall time of the steps it took part in
    queued: float = 0.0  # when the engine got it, by time.perf_counter
    started: float = 0.0  # when it first ran, and how many of its tokens were cached by then
    shared: int = 0
    drafts: bool = True  # false once drafting has failed for it: it is then decoded plainly
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    counts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cached :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated; a draft deeper than remaining - 1 is wasted."""
        return self.params.max_tokens - self.generated
