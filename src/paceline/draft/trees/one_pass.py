"""Drafters that draft all their tokens in one pass; trees grow from its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.batch import Span
from paceline.core.tree import chain_parents
from paceline.draft.trees.grow import Growing, Logits, grow
from paceline.draft.trees.levels import LevelDrafter

# Options of a config.json, as vLLM reads them: the token of the rows behind the text.
MASK_OPTIONS = ("pard_token", "ptd_token_id")


class OnePassDrafter(LevelDrafter):
    """Drafts all its tokens in one pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469): behind
    the text stand tokens ``mask``, and the logits after the last token and after each mask are
    those of the tokens to draft. The next step's text overwrites the masks' rows. A base to stand
    before that of a drafter by levels::

        rows      x_n-1    x_n      mask     mask
        drafts             x_n+1    x_n+2    x_n+3
    """

    growth = None
    _along = False

    def __init__(self, mask: int, *given: Any) -> None:
        super().__init__(*given)
        self._mask = mask
        self._after: dict[int, Any] = {}  # what this step's pass says of each sequence, by depth

    def passes(self, length: int) -> int:
        return min(1, length)

    def _room(self, length: int) -> int:
        return max(0, self._policy.depth(length) - 1)

    def _pass(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits ``[R, columns]`` of spans, in a vocabulary that ``_narrow`` knows."""
        raise NotImplementedError

    def _first(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        """Run the text and its masks: logits of the first drafted token."""
        ends = {t.item.seq.seq_id: t.base + self._room(t.item.draft_length) for t in trees}
        known = [(span, span.context + span.pending) for span in spans]
        masked = [self._masked(span, ends.get(span.seq_id, end) - end) for span, end in known]
        return self._drafted(masked, trees)

    def _masked(self, span: Span, count: int) -> Span:
        return replace(span, parents=chain_parents(count), nodes=[self._mask] * count)

    def _drafted(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        logits = self._pass(spans)
        if not trees:
            return logits
        drafting = [span for span in spans if span.wants_logits]
        counts = [(span.pending > 0) + len(span.nodes) for span in drafting]
        parts = torch.split(logits, counts)
        ids = [tree.item.seq.seq_id for tree in trees]
        self._after = dict(zip(ids, parts, strict=True))
        return self._level(list(trees))

    def _level(self, trees: list[Growing]) -> Logits:
        """Logits at the trees' depths, counted from the deepest."""
        parts = []
        for tree in trees:
            depth = tree.depth - 1 - self._room(tree.item.draft_length)
            parts.append(self._after[tree.item.seq.seq_id][depth].expand(tree.rows, -1))
        return self._narrow(torch.cat(parts))

    def forget(self, seq_id: int) -> None:
        self._after.pop(seq_id, None)
        super().forget(seq_id)

    def _made_up(self, trees: Sequence[Growing]) -> Logits:
        """A pass behind the rows of made-up sequences."""
        rows = 1 + self._room(2)
        spans = [self._masked(Span.of(t.item.seq.seq_id, t.base, ()), rows) for t in trees]
        return self._drafted(spans, trees)

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """A pass of some made-up sequences, and the growth of their trees."""
        rows = 1 + self._room(2)
        if self.cache.num_blocks * self.cache.block_size > rows:  # else it never drafts
            with self._made_up_trees(batch_size, rows, self._policy) as trees:
                grow(trees, self._made_up(trees), self._level, self._generator)
