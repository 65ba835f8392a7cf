"""Drafters that draft all their tokens in one pass. Their trees grow from its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.batch import Span
from paceline.core.tree import chain_parents
from paceline.draft.trees.grow import GrowingTree, Logits, grow
from paceline.draft.trees.levels import LevelDrafter

# Names in config.json, as vLLM reads them, of the mask token: it stands for a token to be drafted.
MASK_OPTIONS = ("pard_token", "ptd_token_id")


class OnePassDrafter(LevelDrafter):
    """Drafts all its tokens in one pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469).

    Mask tokens follow the text. The logits after the text's last token and after each mask are
    those of the drafted tokens. The next step's text overwrites the rows of the masks. A mixin:
    list it before a level-by-level drafter, whose passes it replaces::

        rows      x_n-1    x_n      mask     mask
        drafts             x_n+1    x_n+2    x_n+3
    """

    tree_grower = None
    _follows_grammar = False

    def __init__(self, mask: int, *args: Any) -> None:
        """``mask``: the mask token. The other arguments are the level-by-level drafter's."""
        super().__init__(*args)
        self._mask = mask
        self._pass_outputs: dict[int, Any] = {}  # of this step's pass, by ``seq_id``

    def passes(self, length: int) -> int:
        return min(1, length)

    def _rows_for_nodes(self, length: int) -> int:
        return max(0, self._policy.depth(length) - 1)

    def _run_spans(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        """Run the text with masks after it: logits of the first drafted token."""
        counts = {t.item.seq.seq_id: self._rows_for_nodes(t.item.draft_length) for t in trees}
        masked = [self._with_masks(span, counts.get(span.seq_id, 0)) for span in spans]
        return self._run_pass(masked, trees)

    def _with_masks(self, span: Span, count: int) -> Span:
        return replace(span, parents=chain_parents(count), nodes=[self._mask] * count)

    def _run_pass(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        logits = self._run_model(spans, ())
        if not trees:
            return logits
        drafting = [span for span in spans if span.wants_logits]
        counts = [(span.pending > 0) + len(span.nodes) for span in drafting]
        parts = torch.split(logits, counts)
        ids = [tree.item.seq.seq_id for tree in trees]
        self._pass_outputs = dict(zip(ids, parts, strict=True))
        return self._run_frontiers(list(trees))

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        """Logits at the depths of the trees' frontiers, counted from the pass's last row."""
        parts = []
        for tree in trees:
            depth = tree.depth - 1 - self._rows_for_nodes(tree.item.draft_length)
            parts.append(self._pass_outputs[tree.item.seq.seq_id][depth].expand(tree.rows, -1))
        return self._as_target_logits(torch.cat(parts))

    def forget(self, seq_id: int) -> None:
        self._pass_outputs.pop(seq_id, None)
        super().forget(seq_id)

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        """Run masks after the rows of made-up sequences."""
        rows = 1 + self._rows_for_nodes(2)
        spans = [self._with_masks(Span.of(t.item.seq.seq_id, t.base, ()), rows) for t in trees]
        return self._run_pass(spans, trees)

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """Run a pass over some made-up sequences, and grow their trees."""
        rows = 1 + self._rows_for_nodes(2)
        if self.cache.num_blocks * self.cache.block_size > rows:  # a smaller cache never drafts
            with self._warm_up_trees(batch_size, rows, self._policy) as trees:
                grow(trees, self._warm_up_logits(trees), self._run_frontiers, self._generator)
