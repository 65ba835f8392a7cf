"""The records that pass between the stages of a step: plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.adapter import Adapter, AdapterRun, adapter_runs
from paceline.core.params import SamplingParams, TokenLogprob
from paceline.core.sequence import SequenceView
from paceline.core.transfer import Arrival
from paceline.core.tree import TokenTree, depths_of

NOBODY = SequenceView(-1, (), 0, SamplingParams())  # of rows without a request
EMPTY = TokenTree.empty()


@dataclass(frozen=True)
class Slice:
    """The part of one sequence in a step.

    ``scheduled`` pending tokens go through the target. If these are all, the sequence decodes: it
    may draft up to ``draft_length`` levels and gains at least one token. Otherwise it is a prefill
    chunk, without draft or sampling. ``drafts`` False: drafting failed, no drafter sees the
    sequence any more. ``drafter``: who drafts, of several; None: the first that has a proposal."""

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
    """The sequences that run in a step."""

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
    itself. A tree drafted level by level runs its later levels with ``pending = 0``. ``long``:
    rotated with the long factors of a model that has two sets (longrope).

    Rows of logits: ``logit_row`` is the distribution after the last pending token (of the first
    node, if there is none), ``logit_row + 1 + i`` that after node i of ``tree``; both exist if
    ``wants_logits``. The first ``scored`` pending rows have logits just before.

    ``tokens``: the pending ones. ``nodes``: tokens of the new nodes, int64 ``[len(parents) -
    first_new]`` where the host does not know them. ``ancestors``: bool ``[nodes, nodes]`` on the
    device for a tree that only the device knows: which nodes each node sees, itself included;
    ``parents`` then only have the right depths. ``seq`` and ``tree``: in the target's forwards.
    ``arrival``: the tree's tokens for a grammar, which is followed on the host during the forward.
    ``adapter``: what the rows' linear modules add.
    ``start``, ``logit_row`` and ``long`` are set by ``PagedCache.batch_of``. Pickling and comparing
    use the first seven fields."""

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
    adapter: Adapter | None = field(default=None, compare=False)

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
        adapter: Adapter | None = None,
    ) -> Span:
        """A span without a request, as in a drafter's forward; not yet in a batch."""
        return cls(
            *(seq_id, 0, context, len(tokens), parents, first_new, False),
            *(0, wants_logits, 0, tokens, nodes, ancestors),
            adapter=adapter,
        )

    @classmethod
    def of_request(
        cls, seq: SequenceView, tree: TokenTree = EMPTY, scheduled: int | None = None
    ) -> Span:
        """A request's next ``scheduled`` tokens (None: all pending ones) and its draft."""
        count = seq.num_pending if scheduled is None else scheduled
        return cls(
            *(seq.seq_id, 0, seq.cached, count, tree.parents),
            wants_logits=count == seq.num_pending,
            scored=min(count, seq.unscored),
            tokens=seq.tokens[seq.cached : seq.cached + count],
            nodes=tree.tokens if tree.known is None else tree.known,
            seq=seq,
            tree=tree,
            arrival=Arrival(tree.tokens) if seq.read_on_host and len(tree) else None,
            adapter=seq.adapter,
        )

    def at(self, start: int, logit_row: int, long: bool = False) -> Span:
        """The same span in a batch."""
        span = object.__new__(Span)  # replace() takes five times as long
        vars(span).update(vars(self), start=start, logit_row=logit_row, long=long)
        return span

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
        """The row of logits after those."""
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
        """Logical cache indices of the rows (node i: context + pending + i)."""
        base = self.context + self.pending
        if self.pending:
            return range(self.context, base + len(self.parents))
        return range(base + self.first_new, base + len(self.parents))


@dataclass(frozen=True)
class Batch:
    """One ragged forward of a model over its paged cache, on the host.

    ``input_ids``, ``positions``, ``slots``: one a row; ``slots``: where the cache stores the row's
    key and value. ``tables[i]``: cache block ids of span i. ``logit_rows``: rows whose logits are
    wanted, None for all; ``choices_only``: a backend that chooses greedily may leave logits out.
    ``features``: layers whose inputs are wanted; the number of layers means the final norm's
    output. ``nodes``: (first row, tokens) of trees whose tokens only the device knows; their
    ``input_ids`` are void.

    No tensors: torch's first operator between two forwards takes longer than the rest of a step. A
    forward on a device copies it there with the rest of its input (AttentionStep)."""

    input_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    spans: tuple[Span, ...]
    tables: tuple[tuple[int, ...], ...]
    logit_rows: Sequence[int] | None = None
    nodes: tuple[tuple[int, torch.Tensor], ...] = ()
    features: Sequence[int] = ()
    choices_only: bool = False

    @property
    def adapter_runs(self) -> list[AdapterRun]:
        return adapter_runs([(span.adapter, span.rows) for span in self.spans], self.logit_rows)


@dataclass(frozen=True)
class ModelOutput:
    """``logits`` ``[R, vocab]`` in the model's dtype; ``features[layer]`` ``[T, hidden]``.
    ``greedy``: each row's ``core.sampling.greedy_choice`` if the backend made it; there are then no
    logits if nothing else was asked for."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    greedy: Sequence[int] | None = None


@dataclass(frozen=True)
class Verdict:
    """The rule's decision on one tree: accepted nodes, root to leaf, and the token after them. With
    an ``error`` there is neither, and the request cannot go on."""

    path: tuple[int, ...]  # node indices
    tokens: tuple[int, ...]  # their tokens, then the target's own token; len(path) + 1
    # The token that each row yields, 1 + nodes; 0 where unknown (``wants_choices``).
    choices: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    error: str | None = None


@dataclass(frozen=True)
class Commit:
    """What a step added to one sequence.

    ``tokens`` may be shorter than the verdict's (stop condition, token limit). ``path``: nodes
    whose keys and values stay; ``tokens[:len(path)]`` came from the draft. ``drafted``: the tree's
    nodes, ``levels`` its depth, ``reached`` the levels at which it had a token to try.
    ``finish_reason``: "stop", "length", "error" or None. A prefill chunk commits no tokens. A
    failing sequence ends alone with the tokens it had, and ``error`` says why in a line.

    Rows of the step's output: features of scheduled token i (at position ``position + i``) are row
    ``row + i``, those of node j row ``row + scheduled + j``. Decoding sequences have logits: after
    the last scheduled token row ``logit_row``, after node j row ``logit_row + 1 + j``. ``choices``:
    the target's tokens at those rows (argmax, or drawn), also off the accepted path.
    ``prompt_logprobs``: of the prompt's tokens from ``position + 1`` on."""

    seq_id: int
    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()
    drafted: int = 0
    levels: int = 0
    reached: int = 0
    scheduled: int = 0  # pending tokens that the step ran and cached
    last: int = 0  # the last of them, before ``tokens``
    position: int = 0
    row: int = 0
    logit_row: int = 0
    choices: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    drafter: str = ""  # who drafted the tree
