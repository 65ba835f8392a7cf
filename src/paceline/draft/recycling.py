"""Token recycling: stores the target's top-k tokens after each token, and drafts them next time.

Luo et al. 2024 (arXiv 2408.08696). Each row of logits gives the target's k likeliest tokens after
the row's token. A matrix ``[vocab, k]`` stores the latest such list of each token. A tree of fixed
shape is read from it: the children of the last committed token, their children, and so on. Trees
are top-k lists for sampled requests, too, so their ``Draw`` is POINT, lossless with and without a
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from paceline.core.adapter import Adapter, PerAdapter
from paceline.core.batch import Commit, ModelOutput, Plan
from paceline.core.ranking import top_k_indices
from paceline.core.sequence import PerSequence, SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.base import LookupDrafter
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft, option
from paceline.draft.trees.grow import levels_of
from paceline.draft.trees.shape import Shape, best_shape

_Item = TypeVar("_Item", bound=tuple[Any, ...])
# How often the target's next token was candidate 1, 2, ... in the list of the token before it,
# measured on the embedded target; nearly the same at greater depths.
CHANCES = (0.6, 0.09, 0.05, 0.015, 0.012, 0.01, 0.007, 0.005)
DEPTH = 8  # the most levels of a tree
# Top-k over the vocabulary costs 1 to 2 % of a step. After _IDLE steps without drafts the drafter
# learns only from every _IDLE-th step.
_IDLE = 8


class Matrix:
    """``candidates`` int32 ``[vocab, k]``: the k likeliest tokens after each token, as last seen.
    ``known_tokens``: those whose row was written. Rows of rejected nodes are written as well, but
    the host would have to wait for the device to learn which tokens these are."""

    def __init__(self, vocab: int, k: int, device: torch.device | str) -> None:
        self.candidates = torch.zeros(vocab, k, dtype=torch.int32, device=device)
        self.known_tokens: set[int] = set()

    def grow(self, roots: Sequence[int], shape: Shape) -> torch.Tensor:
        """int64 ``[len(roots), len(shape)]``: a tree below each root; 0 below unknown tokens."""
        device, k = self.candidates.device, self.candidates.shape[1]
        expanded = to_device(roots, device).unsqueeze(1)
        levels: list[torch.Tensor] = []
        for level in levels_of(shape, k, device):
            chosen = self.candidates[expanded].flatten(1).index_select(1, level.picks).long()
            levels.append(chosen)
            expanded = chosen if level.expanded is None else chosen[:, level.expanded]
        return torch.cat(levels, dim=1)


@dataclass
class _State:
    """A sequence's matrix, and the tokens of the tree that is being verified."""

    matrix: Matrix
    tokens: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Recycling(DraftSpec):
    """Trees of up to ``nodes`` nodes from a matrix of ``k`` candidates per token. ``share``: all
    requests with the same adapter share a matrix; otherwise each starts with an empty one."""

    kind = "recycling"
    learns_across_requests = True
    tune_tries = "always"
    examples = ("recycling", "recycling:k=4,nodes=20,share=off")

    k: int = option(8, least=1)
    nodes: int = option(12, least=1, most=1024)
    share: bool = True

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        drafter = RecyclingDrafter(loading.target.device, loading.target.vocab_size, self)
        return PreparedDraft(lambda context: drafter)


class RecyclingDrafter(LookupDrafter):
    """Proposes a tree if the last committed token has a row in the matrix. ``vocab``: width of the
    target's logits."""

    name = "recycling"
    reads_logits = True
    drafts_before_choice = False
    states: PerSequence[_State]

    def __init__(
        self, device: torch.device | str, vocab: int, spec: Recycling | None = None
    ) -> None:
        super().__init__(device)
        spec = spec or Recycling()
        k = min(spec.k, vocab)
        self._vocab, self._k = vocab, k
        chances = (*CHANCES, *(CHANCES[-1],) * k)[:k]
        self._shape = best_shape((chances,) * DEPTH, spec.nodes)
        self._share = spec.share
        self.clear()
        self._asked = False  # whether this step's plan asked for drafts
        self._idle = 0  # steps since a plan asked for drafts

    def clear(self) -> None:
        """Forget what earlier requests showed."""
        self._shared: PerAdapter[Matrix] | None = PerAdapter() if self._share else None

    def max_nodes(self, length: int) -> int:
        return len(self._shape.cut(length))

    def passes(self, length: int) -> int:
        return 1 if length else 0

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        self._asked = any(item.draft_length for item in plan.slices)
        ready: list[tuple[int, int, int, _State]] = []  # slice index, root token, levels, state
        for index, item in enumerate(plan.slices):
            state = self.states.get_or_make(item.seq, self.new_state)
            state.tokens = None
            if not (item.decodes and item.draft_length):
                continue
            root, levels = item.seq.tokens[-1], min(item.draft_length, self._shape.depth)
            if root in state.matrix.known_tokens:
                ready.append((index, root, levels, state))
        trees = [self._empty] * len(plan.slices)
        for group in _by_matrix(ready):
            shape = self._shape.cut(max(levels for *_, levels, _ in group))
            roots = [root for _, root, _, _ in group]
            tokens = group[0][-1].matrix.grow(roots, shape)
            for row, (index, _, levels, state) in zip(tokens, group, strict=True):
                parents = shape.cut(levels).parents  # the first levels come first
                trees[index] = TokenTree(row[: len(parents)], parents)
                state.tokens = trees[index].tokens
        return trees

    def new_state(self, seq: SequenceView) -> _State:
        return _State(self._matrix(seq.adapter))

    def _matrix(self, adapter: Adapter | None) -> Matrix:
        """The matrix that the adapter's requests share, or a new one."""
        new = partial(Matrix, self._vocab, self._k, self._device)
        return new() if self._shared is None else self._shared.get(adapter, new)

    # -- learning ----------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        self._idle = 0 if self._asked else self._idle + 1
        self._asked = False
        seen = [
            (commit, state)
            for commit in commits
            if (state := self.states.get(commit.seq_id)) is not None and commit.tokens
        ]
        if not seen or (self._idle > _IDLE and self._idle % _IDLE):
            return
        best = self._best(out.logits)
        for group in _by_matrix(seen):
            self._learn(best, group)

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """The k likeliest tokens of each row, int32 ``[R, k]``."""
        return top_k_indices(logits[:, : self._vocab], self._k).to(torch.int32)

    def _learn(self, best: torch.Tensor, seen: Sequence[tuple[Commit, _State]]) -> None:
        """Write the lists ``best [R, k]`` of these sequences' rows into their matrix."""
        matrix = seen[0][1].matrix
        last = [commit.last for commit, _ in seen]
        rows = [commit.logit_row for commit, _ in seen]
        nodes: list[torch.Tensor] = []
        matrix.known_tokens.update(last)
        for commit, state in seen:
            matrix.known_tokens.update(commit.tokens[: len(commit.path)])
            if state.tokens is not None and len(state.tokens) == commit.drafted:
                nodes.append(state.tokens)
                rows += range(commit.logit_row + 1, commit.logit_row + 1 + commit.drafted)
            state.tokens = None
        tokens = torch.cat([to_device(last, best.device), *nodes])
        # A token may have several rows in a step; it does not matter which of the lists is stored.
        ordered = rows == list(range(len(best)))
        matrix.candidates[tokens] = best if ordered else best[to_device(rows, best.device)]

    def warm_up(self, batch_size: int) -> None:
        """Read a tree for each sequence, and do the top-k over as many rows as verification has."""
        matrix = self._matrix(None)
        tokens = matrix.grow([0] * batch_size, self._shape)
        self._best(torch.zeros(batch_size + tokens.numel(), self._vocab, device=self._device))


def _by_matrix(items: list[_Item]) -> list[list[_Item]]:
    """The items grouped by the matrix of the state that each ends with."""
    groups: dict[int, list[_Item]] = {}
    for item in items:
        groups.setdefault(id(item[-1].matrix), []).append(item)
    return list(groups.values())
