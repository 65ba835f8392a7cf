"""Dynamic trees: the drafter's probabilities decide their shape.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858). The likeliest nodes of every level are expanded, and the
likeliest of all candidates are kept. Their indices stay on the device until the trees are complete;
one transfer then gives all shapes. Nodes that are too unlikely are left out. On the CPU, where
reading a tensor does not wait, a tree also ends when it is too unlikely that another level is
accepted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch

from paceline.core import transfer
from paceline.core.batch import Slice
from paceline.core.sampling import is_unadjusted
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.trees.grow import GrowingTree
from paceline.model.backends.base import NO_EARLY_STOP, EarlyStop, GrownTree


class DynamicTree(GrowingTree):
    """Expands the ``width`` likeliest nodes of each level; keeps the ``nodes`` likeliest of all.

    A node's score is the log-probability of its path, so no node outranks its parent. Nodes are
    chosen, not sampled, so ``Draw`` is POINT (EAGLE-2, section 4). Candidate c of a level is a
    child of node ``c // width`` of the frontier.
    """

    samples = False

    def __init__(
        self,
        item: Slice,
        depth: int,
        width: int,
        nodes: int,
        device: torch.device,
        base: int = 0,
        early_stop: EarlyStop = NO_EARLY_STOP,
    ) -> None:
        super().__init__(item, width, device, base)
        self._depth, self._nodes, self._early_stop = depth, nodes, early_stop
        self._scores: list[torch.Tensor] = []
        self._parents: list[int] = []  # each candidate's parent: its index among expanded nodes
        self._expanded_candidates: list[torch.Tensor] = []  # index of each expanded candidate
        self._frontier_scores = torch.empty(0, device=device)

    def growth_size(self) -> tuple[int, int, int] | None:
        size = self._depth, self.width, self._nodes
        return size if is_unadjusted(self.item.seq) else None

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        assert weights is not None
        rows, width = tokens.shape[0], min(self.width, tokens.shape[1])
        scores = weights[:, :width]
        if self._expanded:
            scores = scores + self._frontier_scores.unsqueeze(1)
        flat, ids = scores.reshape(-1), tokens[:, :width].reshape(-1)
        before = len(self._parents)
        first = len(self.expanded_parents) - rows if self._expanded else -1
        self._parents += [first + row for row in range(rows) for _ in range(width)]
        self._tokens.append(ids)
        self._scores.append(flat)
        if len(self._tokens) == self._depth:
            return False
        order = flat.topk(min(self.width, len(flat))).indices.sort().values
        self._frontier_scores = flat.index_select(0, order)
        power, stop, _ = self._early_stop
        if stop and float((power * self._frontier_scores).exp().sum()) < stop:
            return False
        parent_rows = order.div(width, rounding_mode="floor")
        self._expand(ids.index_select(0, order), parent_rows)
        self._expanded_candidates.append(order + before)
        if transfer.has_separate_memory(parent_rows.device):
            self.ancestors = self._extended_mask(parent_rows, first)
            self.expanded_parents += (first,) * len(order)
        else:  # reading does not wait
            self.expanded_parents += tuple([first + row for row in parent_rows.tolist()])
        return True

    def _extended_mask(self, parent_rows: torch.Tensor, first: int) -> torch.Tensor:
        """``ancestors`` with new nodes, the children of the nodes ``first + parent_rows``."""
        known, count = len(self.expanded_parents), len(parent_rows)
        mask = torch.eye(known + count, dtype=torch.bool, device=parent_rows.device)
        if self.ancestors is not None:
            mask[:known, :known] = self.ancestors
            mask[known:, :known] = self.ancestors[first + parent_rows]
        return mask

    def shape_on_device(self) -> torch.Tensor:
        """Three parts: the indices of the kept candidates, ascending, after a -1 for each one left
        out; the candidate index of each expanded node; the scores of the first part, as the bits of
        float32."""
        scores = torch.cat(self._scores)
        best = scores.topk(min(self._nodes, len(scores)))
        least = self._early_stop.node_prob
        unlikely = best.values < (math.log(least) if least > 0 else -math.inf)
        unlikely[0] = False
        # The score minus infinity marks a missing candidate.
        stays = (best.values > -torch.inf) & ~unlikely
        self._kept = torch.where(stays, best.indices, -1).sort().values
        kept_scores = scores.index_select(0, self._kept.clamp(min=0)).float()
        bits = kept_scores.view(torch.int32).long()
        return torch.cat([self._kept, *self._expanded_candidates, bits])

    def finish(self, shape: Sequence[int]) -> GrownTree:
        most = len(self._kept)
        padded, expanded, bits = shape[:most], shape[most:-most], shape[-most:]
        kept = [candidate for candidate in padded if candidate >= 0]
        kept_scores = array("f", array("i", bits).tobytes())[most - len(kept) :]
        slot_of = {candidate: slot for slot, candidate in enumerate(expanded)}
        node_of: dict[int, int] = {}
        parents: list[int] = []
        scores: list[float] = []
        for candidate, score in zip(kept, kept_scores, strict=True):
            parent_slot = self._parents[candidate]
            parent = node_of.get(expanded[parent_slot]) if parent_slot >= 0 else -1
            if parent is None:
                continue  # the parent had the same score and was left out
            node_of[candidate] = len(parents)
            parents.append(parent)
            scores.append(score)
        indices = self._kept[most - len(kept) :]
        if len(node_of) < len(kept):
            rest = [number for number, candidate in enumerate(kept) if candidate in node_of]
            indices = indices.index_select(0, to_device(rest, indices.device))
        tokens = torch.cat(self._tokens).index_select(0, indices)
        slots = tuple(slot_of.get(candidate, -1) for candidate in node_of)
        return GrownTree(TokenTree(tokens, tuple(parents)), slots, tuple(scores))
