"""What passes between the stages of one step: plain data, as could be sent to another process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.params import SamplingParams, TokenLogprob
from paceline.core.sequence import SequenceView
from paceline.core.transfer import Arrival
from paceline.core.tree import TokenTree, depths_of

NOBODY = SequenceView(-1, (), 0, SamplingParams())  # of rows that are no request's
EMPTY = TokenTree.empty()


@dataclass(frozen=True)
class Slice:
    """The part of one sequence in a step: how much is scheduled, and how long a draft may be.

    ``scheduled`` pending tokens go through the target. If they are all that is pending, the
    sequence decodes: it may draft up to ``draft_length`` levels and gains at least one token.
    Otherwise it is a prefill chunk, and neither drafts nor samples. Where drafting has failed
    ``drafts`` is false: no drafter sees the sequence any more. ``drafter``: who is to draft, of
    several that could; None: the first that has anything to propose.
    """

    seq: SequenceView
    scheduled: int
    draft_length: int = 0
    drafts: bool = True
    drafter: Hashable = None

    @property
    def decodes(self) -> bool:
        return self.scheduled == self.seq.num_pending


@dataclass(frozen=True)
class Plan:
    """Who runs in this step."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a ragged batch: for attention, cache, verifier and commit.

    Cache layout of the sequence, by logical index::

        [0 ........ context) [context .. context+pending) [.. one index per tree node ..)
         committed, cached     scheduled                    parents[i], of which the nodes
                                                            from first_new on are scheduled

    Rows in the batch, from ``start`` on: the pending tokens, then nodes ``first_new ..``. A pending
    row attends to everything before it and itself; a node to context, pending, its ancestors and
    itself. A tree drafted level by level runs its later levels with ``pending = 0``. ``long``: keys
    and queries are rotated with the long factors of a model that has two sets (longrope).

    Rows of logits: ``logit_row`` is the distribution after the last pending token (or of the first
    node, without any), that after node i of ``tree`` is row ``logit_row + 1 + i``; both are there
    where ``wants_logits``. The first ``scored`` pending rows have logits, too, just before.

    ``tokens`` are the pending ones, ``nodes`` those of the new nodes, int64
    ``[len(parents) - first_new]`` where the host does not know them. ``ancestors``: bool
    ``[nodes, nodes]`` on the device, of a tree that only the device knows: which nodes each node
    sees, itself included; ``parents`` then tell no more than depths.
    Whose rows they are, ``seq`` and ``tree``, is known of the target's forwards; ``arrival`` is the
    tree's tokens for a grammar, which is followed on the host while the forward runs. ``start``,
    ``logit_row`` and ``long`` are worked out in one place, ``PagedCache.batch_of``. Pickled, or
    compared, a span is its first seven fields: what another process runs.
    """

    seq_id: int
    start: int
    context: int
    pending: int
    parents: tuple[int, ...] = ()
    first_new: int = 0
    long: bool = False
    logit_row: int = field(default=0, compare=False)
    wants_logits: bool = field(default=True, compare=False)
    scored: int = field(default=0, compare=False)
    tokens: Sequence[int] = field(default=(), compare=False)
    nodes: torch.Tensor | Sequence[int] = field(default=(), compare=False)
    ancestors: torch.Tensor | None = field(default=None, compare=False)
    seq: SequenceView = field(default=NOBODY, compare=False)
    tree: TokenTree = field(default=EMPTY, compare=False)
    arrival: Arrival | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        seq_id: int,
        context: int,
        tokens: Sequence[int],
        parents: tuple[int, ...] = (),
        nodes: torch.Tensor | Sequence[int] = (),
        first_new: int = 0,
        wants_logits: bool = True,
        ancestors: torch.Tensor | None = None,
    ) -> Span:
        """Of a drafter's forward, or another's that has no request: not in a batch yet."""
        return cls(
            *(seq_id, 0, context, len(tokens), parents, first_new, False),
            *(0, wants_logits, 0, tokens, nodes, ancestors),
        )

    @classmethod
    def of_request(
        cls, seq: SequenceView, tree: TokenTree = EMPTY, scheduled: int | None = None
    ) -> Span:
        """Of a request's next ``scheduled`` tokens (None: all that are pending) and its draft."""
        count = seq.num_pending if scheduled is None else scheduled
        return cls(
            *(seq.seq_id, 0, seq.cached, count, tree.parents),
            wants_logits=count == seq.num_pending,
            scored=min(count, seq.unscored),
            tokens=seq.tokens[seq.cached : seq.cached + count],
            nodes=tree.tokens if tree.known is None else tree.known,
            seq=seq,
            tree=tree,
            arrival=Arrival(tree.tokens) if seq.constraint is not None and len(tree) else None,
        )

    def at(self, start: int, logit_row: int, long: bool = False) -> Span:
        """The same as part of a batch."""
        placed = object.__new__(Span)  # replace() takes five times as long
        vars(placed).update(vars(self), start=start, logit_row=logit_row, long=long)
        return placed

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.seq_id, self.start, self.context, self.pending, self.parents
        return Span, (*shape, self.first_new, self.long)

    @property
    def rows(self) -> int:
        return self.pending + len(self.parents) - self.first_new

    @property
    def judged_rows(self) -> int:
        """Rows of logits for the verifier: after the last committed token and each node."""
        return 1 + len(self.tree)

    @property
    def end_row(self) -> int:
        """The first row of logits behind those."""
        return self.logit_row + self.judged_rows

    @property
    def kv_length(self) -> int:
        return self.context + self.pending + len(self.parents)

    @property
    def positions(self) -> list[int]:
        """Position ids of the rows."""
        base = self.context + self.pending
        depths = depths_of(self.parents)[self.first_new :]
        return [*range(self.context, base), *(base - 1 + depth for depth in depths)]

    @property
    def indices(self) -> range:
        """Logical cache indices that the rows write to (node i sits at context + pending + i)."""
        base = self.context + self.pending
        if self.pending:
            return range(self.context, base + len(self.parents))
        return range(base + self.first_new, base + len(self.parents))


@dataclass(frozen=True)
class Batch:
    """One ragged forward of a model over its own paged cache.

    ``input_ids``, ``positions``, ``slots``, one a row; ``slots`` is where the cache stores the
    row's key and value. ``tables[i]`` lists the cache block ids of span i. ``logit_rows``: rows
    whose logits are wanted, or None for all of them; ``choices_only``: a backend that chooses
    greedily by itself may leave them out. ``features``: layers whose inputs are wanted; the number
    of layers stands for the output of the final norm, which the language-model head sees.
    ``nodes``: (first row, tokens) of trees whose tokens only the device knows; their ``input_ids``
    are void.

    It lies on the host, and in no tensors: between two forwards the first operator of torch takes
    longer than all else that a step does. A forward on a device brings it there, together with what
    else it needs (AttentionStep).
    """

    input_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    spans: tuple[Span, ...]
    tables: tuple[tuple[int, ...], ...]
    logit_rows: Sequence[int] | None = None
    nodes: tuple[tuple[int, torch.Tensor], ...] = ()
    features: Sequence[int] = ()
    choices_only: bool = False


@dataclass(frozen=True)
class ModelOutput:
    """``logits`` ``[R, vocab]`` in the model's dtype; ``features[layer]`` ``[T, hidden]``.
    ``greedy``: each row's choice as ``core.sampling.greedy_choice`` makes it, where the backend has
    looked already; if that is all that was asked for there are no logits."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    greedy: Sequence[int] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the rule decides on one tree: accepted nodes, root to leaf, and the token after them.
    With an ``error`` there is no such token, and nothing is accepted: the request cannot go on."""

    path: tuple[int, ...]  # node indices
    tokens: tuple[int, ...]  # their tokens, then the target's own token; len(path) + 1
    # What each row of the span would yield, 1 + nodes; 0 where nobody looked: see wants_choices.
    choices: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    error: str | None = None


@dataclass(frozen=True)
class Commit:
    """What a step added to one sequence; every observer sees this same record.

    ``tokens`` may be shorter than the verdict's (stop condition, token limit). ``path`` are the
    tree nodes whose keys and values stay: ``tokens[:len(path)]`` came from the draft. ``drafted``
    counts the tree's nodes, ``levels`` its depth, ``reached`` the levels at which it had a token to
    try.
    ``finish_reason`` is "stop", "length", "error" or None. A prefill chunk commits no tokens. A
    sequence that fails ends alone, with the tokens it had, and ``error`` says in a line what
    happened.

    Where to find the step's output: the features of scheduled token i (at absolute position
    ``position + i``) are row ``row + i``, those of tree node j row ``row + scheduled + j``. Only
    decoding sequences have logits: the distribution after the last scheduled token is logits row
    ``logit_row``, that after node j row ``logit_row + 1 + j``. ``choices`` are the tokens that the
    target chose at those rows (argmax, or drawn), also where no accepted path leads.
    ``prompt_logprobs`` are those of the prompt's tokens from ``position + 1`` on.
    """

    seq_id: int
    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()
    drafted: int = 0
    levels: int = 0
    reached: int = 0
    scheduled: int = 0  # pending tokens that the step ran; their keys and values are cached now
    last: int = 0  # the last of them: that before ``tokens``
    position: int = 0
    row: int = 0
    logit_row: int = 0
    choices: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
