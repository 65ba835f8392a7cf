"""One request being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.params import SamplingParams


@dataclass
class DraftCounts:
    """What speculation did for one sequence; positions count from the first drafted token."""

    target_steps: int = 0  # forwards that yielded tokens (prefill chunks before the last do not)
    drafted: int = 0
    accepted: int = 0
    reached_at: list[int] = field(default_factory=list)  # drafts whose earlier tokens all held
    accepted_at: list[int] = field(default_factory=list)

    def record(self, depth: int, accepted: int, nodes: int) -> None:
        """Count one verified tree of ``nodes`` nodes and ``depth`` levels."""
        self.target_steps += 1
        self.drafted += nodes
        self.accepted += accepted
        while len(self.reached_at) < depth:
            self.reached_at.append(0)
            self.accepted_at.append(0)
        for position in range(min(depth, accepted + 1)):
            self.reached_at[position] += 1
            self.accepted_at[position] += position < accepted


@dataclass
class Sequence:
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
    def room(self) -> int:
        """Tokens that may still be generated; a draft deeper than room - 1 is wasted."""
        return self.params.max_tokens - self.generated
