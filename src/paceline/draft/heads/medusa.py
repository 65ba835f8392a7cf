"""Medusa: several heads on the target's last hidden state draft several tokens at once.

Cai et al. 2024 (arXiv 2401.10774). The target's head chose the last committed token x from the
hidden state of one row, that of the last accepted node. From the same row head 0 predicts the token
after x, head 1 the next one, and so on::

    row of the last accepted node:   target's head -> x    head 0 -> 1st draft    head 1 -> 2nd ...

All heads run in one pass over all sequences. A head does not see the tokens of the others, so all
nodes of a level have the same candidates: node (r0, r1) of a sparse tree is candidate r0 of head 0
followed by candidate r1 of head 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.draws import draft_candidates, draw_kind
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, needs_paths
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, depths_of
from paceline.draft.heads.features import QUANTIZE, FeatureRow, join_features, ready_head
from paceline.draft.heads.medusa_head import FILES, load_medusa
from paceline.draft.spec import (
    DraftInfo,
    DraftSpec,
    LoadContext,
    Note,
    PreparedDraft,
    Target,
    option,
    reduced,
)
from paceline.draft.trees.grow import GrowingTree, StaticTree, grow
from paceline.draft.trees.shape import Shape, best_shape
from paceline.model.backends.base import DraftingHeads
from paceline.model.target import CausalModel

# Default accuracy of each head's first candidate, roughly as in the paper. Candidate r + 1 is right
# in 30 % of the other cases, times 0.7 ** r.
_FIRST = (0.6, 0.45, 0.35, 0.3, 0.25)


def _default_accuracy(heads: int) -> list[list[float]]:
    firsts = [_FIRST[min(head, len(_FIRST) - 1)] for head in range(heads)]
    return [[first, *((1 - first) * 0.3 * 0.7**rank for rank in range(9))] for first in firsts]


def shapes_of(
    heads: int, nodes: int, tree: str, accuracy: Sequence[Sequence[float]]
) -> tuple[Shape, ...]:
    """The tree for each draft length from 0 to ``heads``. ``tree``: "auto" (the best tree of
    ``nodes`` nodes, given the heads' ``accuracy``) or "chain"."""
    if tree == "chain":
        return tuple(Shape.branching((1,) * length) for length in range(heads + 1))
    accuracy = accuracy or _default_accuracy(heads)
    return tuple(best_shape(accuracy[:length], nodes) for length in range(heads + 1))


@dataclass(frozen=True)
class Medusa(DraftSpec):
    """Medusa heads by folder, built-in or hub name. ``tree``: "auto" (the best tree of ``nodes``
    nodes, given the heads' measured accuracy) or "chain". ``quantize``: "int8" (for heads with
    vocabulary layers of their own) or "none"."""

    kind = "medusa"
    argument_kind = "head"
    weights = "medusa"
    weight_files = FILES
    examples = ("medusa:{medusa},nodes=12", "medusa:{medusa},tree=chain")

    path: str = option(needs="heads")
    _: KW_ONLY
    nodes: int = option(8, least=1)
    tree: str = option("auto", choices=("auto", "chain"))
    quantize: str = option("int8", choices=QUANTIZE)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        target = loading.target
        heads = load_medusa(self.path, target)
        # The blocks alone are small: rounding them saves 1 to 7 % of a pass.
        heads = ready_head(heads, target, "none" if heads.config.shared_head else self.quantize)
        shapes = shapes_of(heads.config.heads, self.nodes, self.tree, heads.config.accuracy)
        run = target.backend.medusa(heads)
        prior = self.prior()
        return PreparedDraft(lambda c: MedusaDrafter(run, c.target, shapes, c.generator, prior))

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        heads = load_medusa(read, target)
        config, size = heads.config, sum(weight.numel() for weight in heads.parameters())
        shared = "the target's vocabulary layer" if config.shared_head else "vocabulary layers"
        text = f"{config.heads} heads of {config.layers} blocks, width {config.hidden_size}"
        notes: list[Note] = [("head-fits", f"Medusa: {text}, with {shared}", None)]
        if config.draft_vocab_size is not None:
            notes += reduced(config.draft_vocab_size, target)
        return DraftInfo(tuple(notes), size)


@dataclass(eq=False, repr=False)
class MedusaDrafter:
    """Drafts with heads on the target's hidden states. ``shapes[n]``: the tree of n levels.

    The nodes for greedy and seeded requests are the heads' likeliest tokens (for a seed, with the
    coupled noise). For other requests siblings are sampled without replacement. With penalties a
    token's distribution depends on the drafted tokens before it: such trees grow level by level.
    """

    name = "medusa"
    reads_logits = False

    heads: DraftingHeads
    target: CausalModel
    shapes: tuple[Shape, ...]
    generator: torch.Generator | None
    prior: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.features: tuple[int, ...] = (self.target.num_layers,)
        # For each sequence that may draft: the last hidden state from which its last token was
        # chosen, and the position.
        self._seen: dict[int, tuple[FeatureRow, int] | None] = {}
        self._empty = TokenTree.empty(self.target.device)

    def _shape(self, length: int) -> Shape:
        return self.shapes[min(length, len(self.shapes) - 1)]

    def max_nodes(self, length: int) -> int:
        return len(self._shape(length))

    def passes(self, length: int) -> int:
        return 1 if length else 0

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            if item.seq.params.may_draft:
                self._seen.setdefault(item.seq.seq_id)
        ready = [item for item in plan.slices if self._drafts(item)]
        if not ready:
            return [self._empty] * len(plan.slices)
        states = [self._seen[item.seq.seq_id] for item in ready]
        (features,) = join_features([state[0] for state in states if state is not None])
        levels = max(self._shape(item.draft_length).depth for item in ready)
        logits = self.heads(features, levels)
        trees: dict[int, TokenTree] = {}
        independent = [i for i, item in enumerate(ready) if not needs_paths((item.seq,))]
        if independent:
            whole = len(independent) == len(ready)
            part = logits if whole else logits[to_device(independent, logits.device)]
            trees |= self._crossed([ready[i] for i in independent], part)
        for i, item in enumerate(ready):
            if i not in independent:
                trees[item.seq.seq_id] = self._grown(item, logits[i])
        return [trees.get(item.seq.seq_id, self._empty) for item in plan.slices]

    def _drafts(self, item: Slice) -> bool:
        """Whether the hidden state before the last committed token is known: it is not in the first
        step, after a shared prefix, or after preemption."""
        if not item.decodes or not len(self._shape(item.draft_length)):
            return False
        seen = self._seen.get(item.seq.seq_id)
        return seen is not None and seen[1] + 2 == len(item.seq.tokens)

    def _crossed(self, items: list[Slice], logits: torch.Tensor) -> dict[int, TokenTree]:
        """All sequences' trees by one draw for all levels. ``logits [B, levels, vocab]``."""
        batch, levels, vocab = logits.shape
        shapes = [self._shape(item.draft_length) for item in items]
        width = 1 + max(max(shape.ranks) for shape in shapes)
        seqs = tuple(item.seq for item in items for _ in range(levels))
        rows = Rows(seqs, tuple(range(levels)) * batch)
        drafted = draft_candidates(logits.view(-1, vocab), rows, min(width, vocab), self.generator)
        tokens = drafted.tokens.view(batch, -1)
        trees = {}
        for i, (item, shape) in enumerate(zip(items, shapes, strict=True)):
            picks, depths = _picks(shape, drafted.tokens.shape[1], tokens.device)
            draw = draw_kind(item.seq, shape.branches)
            probs = None
            if draw is not Draw.POINT:
                assert drafted.q is not None
                probs = drafted.q[i * levels : (i + 1) * levels].index_select(0, depths)
            tree = TokenTree(tokens[i].index_select(0, picks), shape.parents, draw, probs)
            trees[item.seq.seq_id] = tree
        return trees

    def _grown(self, item: Slice, logits: torch.Tensor) -> TokenTree:
        """A tree grown by levels: distributions depend on the path. ``logits [levels, vocab]``."""
        tree = StaticTree(item, self._shape(item.draft_length), logits.device)

        def frontier_logits(trees: Sequence[GrowingTree]) -> torch.Tensor:
            return logits[tree.depth].expand(tree.rows, -1)

        return grow([tree], frontier_logits([tree]), frontier_logits, self.generator)[0].tree

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Store the hidden state from which each commit's last token was chosen."""
        states = (out.features[self.features[0]],)
        for commit in commits:
            if commit.seq_id in self._seen:
                row = commit.row + commit.scheduled + (commit.path[-1] if commit.path else -1)
                last = commit.position + commit.scheduled + len(commit.path) - 1
                self._seen[commit.seq_id] = FeatureRow(states, row), last

    def warm_up(self, batch_size: int) -> None:
        """Run all heads on one row of each sequence, and choose the candidates."""
        target, levels = self.target, len(self.shapes) - 1
        size = batch_size, target.hidden_size
        features = torch.zeros(size, dtype=target.dtype, device=target.device)
        seq = SequenceView(-1, [0], 1, SamplingParams())
        item = Slice(seq, 1, levels)
        with torch.inference_mode():
            self._crossed([item] * batch_size, self.heads(features, levels))

    def forget(self, seq_id: int) -> None:
        self._seen.pop(seq_id, None)


@lru_cache(maxsize=512)
def _picks(shape: Shape, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[n]`` each: the nodes' indices in candidates ``[levels * width]``, and levels."""
    levels = [depth - 1 for depth in depths_of(shape.parents)]
    picks = [level * width + rank for level, rank in zip(levels, shape.ranks, strict=True)]
    with torch.inference_mode(False):
        return to_device(picks, device), to_device(levels, device)
