"""One request being decoded: its state, and the view of it that passes between stages.

What a constraint forbids has probability zero. Verifier and drafters with distributions apply it
along the tree's paths, so constrained output is lossless, too; other drafters propose some tokens
in vain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

import torch

from paceline.core.adapter import Adapter
from paceline.core.params import SamplingParams


class Reader(Protocol):
    """Follows a sequence's tokens and knows where it ends: a grammar, or stop strings."""

    def read(self, tokens: Sequence[int]) -> int | None:
        """Follow the next tokens; how many up to the one that ends the text, None if it goes on."""
        ...


class Constraint(Reader, Protocol):
    """A grammar along one sequence (request/grammar.py)."""

    def allowed(self, path: tuple[int, ...]) -> torch.Tensor | None:
        """bool [vocab] on the CPU: tokens that may follow the committed ones and then ``path``.
        None if nothing is forbidden, also after a path that is forbidden or final."""
        ...

    def permits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether ``allowed`` has this token behind ``path``, in less time."""
        ...

    def forced(self, path: tuple[int, ...] = ()) -> Sequence[int] | None:
        """Tokens of the one text that may follow ``path``, as the tokenizer writes it; ``allowed``
        has no others then. Empty if there is a choice; None if none may follow, as it is final."""
        ...


# Of requests: unique in the process.
SEQUENCE_IDS = itertools.count(1)


_Sums = TypeVar("_Sums", bound="Sums")


class Sums:
    """A dataclass of numbers, of counts by position and of amounts by name, which add up."""

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
    """Speculation figures of one sequence; positions count from the first drafted token."""

    target_steps: int = 0  # forwards that yielded tokens (prefill chunks before the last do not)
    drafted: int = 0
    levels: int = 0  # depths of all trees
    accepted: int = 0
    # Accepted tokens by drafter, and steps without a draft by reason.
    by_drafter: dict[str, int] = field(default_factory=dict)
    not_drafted: dict[str, int] = field(default_factory=dict)
    reached_at: list[int] = field(default_factory=list)  # drafts that had a token to try there
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """Of drafted tokens; None: no draft was tried."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rates(self) -> list[float]:
        """Acceptance by position, given that all earlier tokens were accepted."""
        return [won / tried for won, tried in zip(self.accepted_at, self.reached_at, strict=True)]

    def record(
        self, nodes: int, levels: int, accepted: int, reached: int, drafter: str, reason: str
    ) -> None:
        """Count one verified tree. ``reached``: ``accepted`` plus one if the last accepted node had
        children. ``reason``: why there was no draft."""
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
    """How often each token occurs in the output of a text; 0: in its prompt alone. A step counts
    the tokens since the last one: a draft asks for every level, and all of 8,000 take 1.3 ms."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._known = self._prompt = 0  # tokens counted, and those of the prompt

    def of(self, tokens: Sequence[int], prompt_length: int) -> dict[int, int]:
        """In these first tokens of the text."""
        if len(tokens) < self._known or prompt_length != self._prompt:
            self._counts, self._known, self._prompt = {}, 0, prompt_length
        counts = self._counts
        for index, token in enumerate(tokens[self._known :], self._known):
            counts[token] = counts.get(token, 0) + (index >= prompt_length)
        self._known = len(tokens)
        return counts


class TokenView(Sequence[int]):
    """The first ``length`` tokens of a list that is only appended to, and its ``occurrences``.
    Takes no copy; slices are lists. Pickled it is those tokens."""

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


class _Counted:
    """What follows from the tokens and the number of cached ones."""

    tokens: Any
    cached: int
    prompt_length: int
    params: SamplingParams
    adapter: Adapter | None

    @property
    def adapter_number(self) -> int:
        """By which caches and memories are kept apart; 0: no adapter."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def pending(self) -> list[int]:
        pending: list[int] = self.tokens[self.cached :]
        return pending

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def unscored(self) -> int:
        """Pending tokens that are followed by a prompt token to be scored."""
        if self.params.prompt_logprobs is None:
            return 0
        return max(0, self.prompt_length - 1 - self.cached)


@dataclass(frozen=True)
class SequenceView(_Counted):
    """A sequence in one step: everything that its distributions and drafts depend on. Pickled or
    copied views lack grammar, logits processors and adapter: those stay in the process."""

    seq_id: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end generation
    cached: int = 0
    constraint: Constraint | None = field(default=None, compare=False, repr=False)
    adapter: Adapter | None = field(default=None, compare=False, repr=False)

    @property
    def read_on_host(self) -> bool:
        """Whether a distribution depends on drafted tokens that the host must know."""
        return self.constraint is not None or bool(self.params.logits_processors)

    def __reduce__(self) -> tuple[Any, ...]:
        params = self.params
        if params.logits_processors:
            params = replace(params, logits_processors=())
        plain = self.seq_id, self.tokens, self.prompt_length, params, self.stop_ids
        return SequenceView, (*plain, self.cached)


@dataclass(eq=False)  # compared by identity
class SequenceState(_Counted):
    """Committed tokens of one request, and how many of them have cached keys and values.

    ``cached + len(pending) == len(tokens)``, as ``pending`` is derived: the prompt at prefill, one
    token when decoding. Tokens are only ever appended."""

    seq_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids that end generation
    cached: int = 0
    stops: Reader | None = None  # stop strings
    constraint: Constraint | None = None  # what a grammar allows next
    adapter: Adapter | None = None
    seconds: float = 0.0  # wall time of the steps it took part in
    queued: float = 0.0  # when the engine got it, by time.perf_counter
    started: float = 0.0  # when it first ran, and how many of its tokens were cached by then
    shared: int = 0
    drafts: bool = True  # false once drafting has failed for it
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    counts: DraftCounts = field(default_factory=DraftCounts)
    occurrences: Occurrences = field(default_factory=Occurrences)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated; a draft may have at most remaining - 1 levels."""
        return self.params.max_tokens - self.generated

    def view(self) -> SequenceView:
        """The present state as a view."""
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

    def ending(self, tokens: Sequence[int], most: int) -> tuple[int, str | None]:
        """How many of the next tokens are kept, and the finish reason if that is the end.
        ``most`` tokens have room. Advances grammar and stop strings, so it is called once for
        each commit."""
        kept, reason = min(len(tokens), max(most, 1)), "length" if len(tokens) >= most else None
        before = self.params.min_tokens - self.generated - 1
        for index, token in enumerate(tokens[:kept]):
            if token in self.stop_ids and index >= before:
                kept, reason = index + 1, "stop"
                break
        for reader in (self.constraint, self.stops):
            end = None if reader is None else reader.read(tokens[:kept])
            if end is not None:
                kept, reason = end, "stop"
        return kept, reason
