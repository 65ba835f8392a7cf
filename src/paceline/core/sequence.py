"""The sequence of one request: its state, and the read-only view that passes between stages.

A token that the request's grammar forbids has probability zero. The verifier, and drafters that
have distributions, apply the grammar along the tree's paths, so constrained output is lossless as
well. Other drafters propose tokens that are then rejected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

import torch

from paceline.core.adapter import Adapter
from paceline.core.params import SamplingParams


class StopCondition(Protocol):
    """Ends a sequence depending on its tokens: stop strings, or a grammar that is complete."""

    def consume(self, tokens: Sequence[int]) -> int | None:
        """Advance by tokens; returns how many there are up to one that ends the text, or None."""
        ...


class Constraint(StopCondition, Protocol):
    """The state of one sequence in its grammar (request/grammar.py). ``path``: drafted tokens after
    the committed ones."""

    def allowed_tokens(self, path: tuple[int, ...]) -> torch.Tensor | None:
        """bool [vocab] on the CPU: the tokens that may follow ``path``. None if every token may,
        also after a path that the grammar forbids or that completes it."""
        ...

    def is_allowed(self, path: tuple[int, ...], token: int) -> bool:
        """Whether ``token`` is among ``allowed_tokens(path)``; faster than making the mask."""
        ...

    def forced_tokens(self, path: tuple[int, ...] = ()) -> Sequence[int] | None:
        """The tokens after ``path`` if the grammar leaves only one continuation, as the tokenizer
        writes it; ``allowed_tokens`` then allows no others. Empty if there is a choice, None if the
        text is complete or ``path`` forbidden."""
        ...


SEQUENCE_IDS = itertools.count(1)  # unique in the process


_Sums = TypeVar("_Sums", bound="Sums")
_Value = TypeVar("_Value")


class Sums:
    """Base of dataclasses that add up field by field: numbers, lists by position, mappings."""

    def __add__(self: _Sums, other: _Sums) -> _Sums:
        return type(self)(**{k: _sum(v, getattr(other, k)) for k, v in vars(self).items()})


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    if isinstance(one, (list, tuple)):
        return type(one)(map(sum, itertools.zip_longest(one, other, fillvalue=0)))
    return one + other


@dataclass
class DraftCounts(Sums):
    """Draft statistics of one sequence. Position 0 is the first drafted token of a step."""

    target_steps: int = 0  # forwards that yielded tokens: all but unfinished prefill chunks
    drafted: int = 0
    levels: int = 0  # sum of the depths of all trees
    accepted: int = 0
    by_drafter: dict[str, int] = field(default_factory=dict)  # accepted tokens
    not_drafted: dict[str, int] = field(default_factory=dict)  # steps without a draft, by reason
    # By position: drafts that had a token to verify there, and those whose token was accepted.
    reached_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted tokens that were accepted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rates(self) -> list[float]:
        """Acceptance rate by position, given that all earlier positions were accepted."""
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return [accepted / reached for accepted, reached in pairs]

    def record(
        self, nodes: int, levels: int, accepted: int, reached: int, drafter: str, reason: str
    ) -> None:
        """Count one step. ``reached``: ``accepted``, plus one if the walk ended at a node with
        children. ``reason``: why there was no draft, if there are no nodes."""
        if nodes:
            self.by_drafter[drafter] = self.by_drafter.get(drafter, 0) + accepted
        else:
            self.not_drafted[reason] = self.not_drafted.get(reason, 0) + 1
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


class Occurrences:
    """How often each token occurs in the output of a sequence, for penalties; tokens of the prompt
    that do not occur in the output have the count 0. Counting is incremental: every level of a
    draft asks for the counts, and counting 8,000 tokens takes 1.3 ms."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._num_counted = self._prompt_length = 0

    def count(self, tokens: Sequence[int], prompt_length: int) -> dict[int, int]:
        """Count the ``tokens`` of the sequence; only those since the last call are read."""
        if len(tokens) < self._num_counted or prompt_length != self._prompt_length:
            self._counts, self._num_counted, self._prompt_length = {}, 0, prompt_length
        counts = self._counts
        for index, token in enumerate(tokens[self._num_counted :], self._num_counted):
            counts[token] = counts.get(token, 0) + (index >= prompt_length)
        self._num_counted = len(tokens)
        return counts


class TokenView(Sequence[int]):
    """The first ``length`` tokens of a list that only grows, without a copy, and the sequence's
    ``occurrences``. Slices are lists. Pickling copies the tokens."""

    __slots__ = ("_length", "_tokens", "occurrences")

    def __init__(
        self, tokens: list[int], length: int, occurrences: Occurrences | None = None
    ) -> None:
        self._tokens, self._length = tokens, length
        self.occurrences = occurrences or Occurrences()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            if index.step is not None and index.step < 0:  # down to -1, which is no index
                return self._tokens[: self._length][index]
            return self._tokens[slice(*index.indices(self._length))]
        return self._tokens[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenView, (self[:], self._length)


class _TokenCounts:
    """Properties that follow from the tokens and the number of cached ones."""

    tokens: Any
    cached: int
    prompt_length: int
    params: SamplingParams
    adapter: Adapter | None

    @property
    def adapter_number(self) -> int:
        """The number by which caches keep adapters apart; 0: no adapter."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def pending(self) -> list[int]:
        """The tokens whose keys and values are not cached yet."""
        pending: list[int] = self.tokens[self.cached :]
        return pending

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        """The number of output tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def unscored(self) -> int:
        """Pending tokens that need logits for ``prompt_logprobs``: all but the prompt's last."""
        if self.params.prompt_logprobs is None:
            return 0
        return max(0, self.prompt_length - 1 - self.cached)


@dataclass(frozen=True)
class SequenceView(_TokenCounts):
    """A sequence as it is in one step: all that its distributions and drafts depend on. A pickled
    view has no grammar, logits processors and adapter, which stay in the process."""

    seq_id: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end generation
    cached: int = 0
    constraint: Constraint | None = field(default=None, compare=False, repr=False)
    adapter: Adapter | None = field(default=None, compare=False, repr=False)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether the host must know the drafted tokens to compute the sequence's distributions: it
        has a grammar or logits processors."""
        return self.constraint is not None or bool(self.params.logits_processors)

    def __reduce__(self) -> tuple[Any, ...]:
        params = self.params
        if params.logits_processors:
            params = replace(params, logits_processors=())
        plain = self.seq_id, self.tokens, self.prompt_length, params, self.stop_ids
        return SequenceView, (*plain, self.cached)


@dataclass(eq=False)  # compared by identity
class SequenceState(_TokenCounts):
    """The committed tokens of one request, and how many of them have cached keys and values.

    ``cached + len(pending) == len(tokens)`` always holds, because ``pending`` is derived: the
    prompt at prefill, one token when decoding. Tokens are only appended."""

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end generation
    cached: int = 0
    stops: StopCondition | None = None  # stop strings
    constraint: Constraint | None = None  # grammar
    adapter: Adapter | None = None
    seconds: float = 0.0  # wall time of the steps it took part in
    queued: float = 0.0  # when the engine received it, by time.perf_counter
    started: float = 0.0  # when it first ran
    prefix_hit_tokens: int = 0  # tokens found in the prefix cache when it first ran
    drafts: bool = True  # False once drafting has failed for it
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, new tokens) by step
    counts: DraftCounts = field(default_factory=DraftCounts)
    occurrences: Occurrences = field(default_factory=Occurrences)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated. A draft may have at most ``remaining - 1`` levels."""
        return self.params.max_tokens - self.generated

    def view(self) -> SequenceView:
        """A read-only view of the current state."""
        return SequenceView(
            self.seq_id,
            TokenView(self.tokens, len(self.tokens), self.occurrences),
            self.prompt_length,
            self.params,
            self.stop_ids,
            self.cached,
            self.constraint,
            self.adapter,
        )

    def check_stop(self, tokens: Sequence[int], room: int) -> tuple[int, str | None]:
        """Cut the next ``tokens`` at the first stop condition: returns how many are kept and the
        finish reason, None if the sequence goes on. At most ``room`` tokens fit. Advances grammar
        and stop strings, so it must be called once per commit."""
        kept, reason = min(len(tokens), max(room, 1)), "length" if len(tokens) >= room else None
        first_stop = self.params.min_tokens - self.generated - 1  # earliest index of a stop id
        for index, token in enumerate(tokens[:kept]):
            if token in self.stop_ids and index >= first_stop:
                kept, reason = index + 1, "stop"
                break
        for condition in (self.constraint, self.stops):
            end = None if condition is None else condition.consume(tokens[:kept])
            if end is not None:
                kept, reason = end, "stop"
        return kept, reason


class PerSequence(dict[int, _Value]):
    """A value for each sequence, by ``seq_id``."""

    def get_or_make(self, seq: SequenceView, make: Callable[[SequenceView], _Value]) -> _Value:
        """The value of a sequence; the first call makes it by ``make(seq)``. (A stored ``make``
        could be a reference cycle, so the caller passes it.)"""
        value = self.get(seq.seq_id)
        if value is None:
            value = self[seq.seq_id] = make(seq)
        return value
