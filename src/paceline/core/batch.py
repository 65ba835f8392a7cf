"""The records that pass between the stages of a step. They are plain data and can be pickled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from paceline.core.adapter import Adapter, AdapterRun
from paceline.core.params import SamplingParams, TokenLogprob
from paceline.core.sequence import SequenceView
from paceline.core.transfer import HostCopy
from paceline.core.tree import TokenTree, depths_of

NO_SEQUENCE = SequenceView(-1, (), 0, SamplingParams())  # for spans without a request
EMPTY_TREE = TokenTree.empty()


@dataclass(frozen=True)
class Slice:
    """One sequence's share of a step.

    The target runs over the next ``scheduled`` pending tokens. If these are all pending tokens, the
    sequence decodes: its draft may have up to ``draft_length`` levels, and it gains at least one
    token. Otherwise the slice is a prefill chunk, without a draft and without sampling.
    ``drafts`` is False once drafting has failed for the sequence: drafters no longer see it.
    ``drafter``: the member of a hybrid that drafts; None: the first that proposes anything."""

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
    """The sequences that run in a step, one slice each."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a ragged batch, as attention, cache, verifier and commit need it.

    Cache layout of the sequence, by logical index::

        [0 ........ context) [context .. context+pending) [.. one index per tree node ..)
         committed, cached     pending, scheduled           parents[i]; nodes from first_new
                                                            on are rows of this batch

    Rows of the batch, beginning at ``start``: the pending tokens, then the nodes from ``first_new``
    on. A pending token attends to everything before it and to itself, a node to context, pending
    tokens, its ancestors and itself. A tree that is drafted level by level runs its later levels
    with ``pending = 0``. ``long``: RoPE uses the long factors of a model that has two sets
    (longrope).

    Rows of logits, if ``wants_logits``: ``logit_row`` holds the distribution after the last pending
    token (after the first node, if nothing is pending), ``logit_row + 1 + i`` that after node i of
    ``tree``. The logits of the first ``scored`` pending tokens stand directly before ``logit_row``.

    ``tokens``: the pending tokens. ``nodes``: tokens of the new nodes; int64 ``[len(parents) -
    first_new]`` on the device if the host does not know them. ``ancestors``: for a tree whose shape
    only the device knows, bool ``[nodes, nodes]`` there: entry (i, j) is true if node i attends to
    node j, itself included; ``parents`` then have the right depths only. ``seq`` and ``tree`` are
    set in forwards of the target. ``tree_tokens``: the tree's tokens on their way to the host, for
    a grammar that the host follows during the forward. ``adapter``: LoRA adapter of the rows.
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
    seq: SequenceView = field(default=NO_SEQUENCE, compare=False)
    tree: TokenTree = field(default=EMPTY_TREE, compare=False)
    tree_tokens: HostCopy | None = field(default=None, compare=False)
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
        """A span without a request, as in a drafter's forward; it has no rows of a batch yet."""
        return cls(
            *(seq_id, 0, context, len(tokens), parents, first_new, False),
            *(0, wants_logits, 0, tokens, nodes, ancestors),
            adapter=adapter,
        )

    @classmethod
    def of_request(
        cls, seq: SequenceView, tree: TokenTree = EMPTY_TREE, scheduled: int | None = None
    ) -> Span:
        """A request's next ``scheduled`` pending tokens (None: all) and the tree to verify."""
        count = seq.num_pending if scheduled is None else scheduled
        return cls(
            *(seq.seq_id, 0, seq.cached, count, tree.parents),
            wants_logits=count == seq.num_pending,
            scored=min(count, seq.unscored),
            tokens=seq.tokens[seq.cached : seq.cached + count],
            nodes=tree.tokens if tree.host_copy is None else tree.host_copy,
            seq=seq,
            tree=tree,
            tree_tokens=HostCopy(tree.tokens) if seq.needs_host_tokens and len(tree) else None,
            adapter=seq.adapter,
        )

    def placed(self, start: int, logit_row: int, long: bool = False) -> Span:
        """The same span with its place in a batch."""
        span = object.__new__(Span)  # replace() takes five times as long
        vars(span).update(vars(self), start=start, logit_row=logit_row, long=long)
        return span

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.seq_id, self.start, self.context, self.pending, self.parents
        return Span, (*shape, self.first_new, self.long)

    @property
    def rows(self) -> int:
        """How many rows the span has in the batch."""
        return self.pending + len(self.parents) - self.first_new

    @property
    def verify_rows(self) -> int:
        """Rows of logits that the verifier reads: after the last pending token and each node."""
        return 1 + len(self.tree)

    @property
    def end_logit_row(self) -> int:
        """The first row of logits after ``verify_rows``."""
        return self.logit_row + self.verify_rows

    @property
    def kv_length(self) -> int:
        """Cache indices in use after the forward."""
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
    """The input of one ragged forward over a paged cache, on the host.

    ``input_ids``, ``positions`` and ``slots`` have one entry per row; ``slots`` says where the
    cache stores the row's key and value. ``tables[i]``: block table of span i. ``logit_rows``: rows
    whose logits are wanted, ascending; None for all. ``choices_only``: only the argmax of each row
    is wanted, so a backend that computes it may leave the logits out. ``features``: layers whose
    input hidden states are wanted; the number of layers stands for the final norm's output.
    ``nodes``: (first row, tokens) of trees whose tokens only the device knows; their ``input_ids``
    are placeholders.

    The fields are no tensors, because torch's first operator between two forwards takes longer than
    the rest of a step. A forward on a device copies them there with the rest of its input
    (AttentionStep)."""

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
        """The ranges of rows that have a LoRA adapter."""
        runs: list[AdapterRun] = []
        if all(span.adapter is None for span in self.spans):
            return runs
        start, logit_rows = 0, self.logit_rows
        for adapter, group in groupby(self.spans, lambda span: span.adapter):
            end = start + sum(span.rows for span in group)
            if adapter is not None:
                logits = slice(start, end)
                if logit_rows is not None:
                    first, after = (sum(row < at for row in logit_rows) for at in (start, end))
                    logits = slice(first, after)
                runs.append(AdapterRun(adapter, slice(start, end), logits))
            start = end
        return runs


@dataclass(frozen=True)
class ModelOutput:
    """What a forward returns: ``logits`` ``[R, vocab]`` in the model's dtype, ``features[layer]``
    ``[T, hidden]``. ``greedy``: the argmax of each row (``core.sampling.greedy_choice``) if the
    backend computed it; logits are then left out if the batch was ``choices_only``."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    greedy: Sequence[int] | None = None


@dataclass(frozen=True)
class Verdict:
    """The verifier's decision on one tree: the accepted nodes and the token after them. A verdict
    with an ``error`` has neither, and ends the request."""

    path: tuple[int, ...]  # indices of the accepted nodes, from the root down
    tokens: tuple[int, ...]  # tokens of the accepted nodes, then the target's own: len(path) + 1
    # The target's token at each of the 1 + nodes rows; 0 where unknown (``wants_choices``).
    choices: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    error: str | None = None


@dataclass(frozen=True)
class Commit:
    """What a step added to one sequence.

    ``tokens`` are those of the verdict, cut at a stop condition or token limit; a prefill chunk
    commits none. ``path``: accepted nodes, whose keys and values stay in the cache;
    ``tokens[:len(path)]`` came from the draft. ``drafted``: number of nodes of the tree,
    ``levels``: its depth, ``reached``: levels at which the walk had a candidate to verify.
    ``finish_reason``: "stop", "length", "error" or None. A sequence that fails keeps the tokens it
    had, and ``error`` says why in one line.

    Rows of the step's ModelOutput: the features of scheduled token i (at position ``position + i``)
    are row ``row + i``, those of node j row ``row + scheduled + j``. The logits after the last
    scheduled token of a decoding sequence are row ``logit_row``, those after node j row
    ``logit_row + 1 + j``. ``choices``: the target's tokens at these rows (argmax or sampled), off
    the accepted path as well. ``prompt_logprobs``: of the prompt's tokens from ``position + 1``
    on."""

    seq_id: int
    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()
    drafted: int = 0
    levels: int = 0
    reached: int = 0
    scheduled: int = 0  # pending tokens that the step ran and cached
    last: int = 0  # the last of those; ``tokens`` follow it
    position: int = 0  # index of the first of those in the sequence
    row: int = 0
    logit_row: int = 0
    choices: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if the request wants them
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    drafter: str = ""  # name of the drafter that proposed the tree
