"""Trees whose shape the drafter's probabilities decide (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

They expand the likeliest nodes of every level and keep the likeliest of all candidates. Which these
are stays on a device until the trees are complete; one transfer then gives all shapes. Nodes that
are too unlikely are left out; and where reading does not wait, a tree ends when it is too unlikely
that the text reaches another level.
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
from paceline.draft.trees.grow import Growing
from paceline.model.backends.base import WHOLE, Ending, GrownTree


class DynamicTree(Growing):
    """Expands the ``width`` likeliest nodes of each level; keeps the ``nodes`` likeliest of all.

    A node's score is the log-probability of its path, so no node outranks its parent. Nodes are
    chosen, not drawn: POINT (EAGLE-2, section 4). Candidate ``c`` of a level is a child of its
    expanded node ``c // width``.
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
        ending: Ending = WHOLE,
    ) -> None:
        super().__init__(item, width, device, base)
        self._depth, self._nodes, self._ending = depth, nodes, ending
        self._scores: list[torch.Tensor] = []
        self._parents: list[int] = []  # of each candidate, among the expanded nodes
        self._expanded_as: list[torch.Tensor] = []  # the candidate that each expanded node is
        self._newest_scores = torch.empty(0, device=device)

    def plain_size(self) -> tuple[int, int, int] | None:
        size = self._depth, self.width, self._nodes
        return size if is_unadjusted(self.item.seq) else None

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        assert weights is not None
        rows, width = tokens.shape[0], min(self.width, tokens.shape[1])
        scores = weights[:, :width]
        if self._expanded:
            scores = scores + self._newest_scores.unsqueeze(1)
        flat, ids = scores.reshape(-1), tokens[:, :width].reshape(-1)
        before = len(self._parents)
        first = len(self.expanded_parents) - rows if self._expanded else -1
        self._parents += [first + row for row in range(rows) for _ in range(width)]
        self._tokens.append(ids)
        self._scores.append(flat)
        if len(self._tokens) == self._depth:
            return False
        order = flat.topk(min(self.width, len(flat))).indices.sort().values
        self._newest_scores = flat.index_select(0, order)
        power, stop, _ = self._ending
        if stop and float((power * self._newest_scores).exp().sum()) < stop:
            return False
        above = order.div(width, rounding_mode="floor")
        self._expand(ids.index_select(0, order), above)
        self._expanded_as.append(order + before)
        if transfer.has_separate_memory(above.device):
            self.ancestors = self._seen(above, first)
            self.expanded_parents += (first,) * len(order)
        else:  # reading does not wait
            self.expanded_parents += tuple([first + row for row in above.tolist()])
        return True

    def _seen(self, above: torch.Tensor, first: int) -> torch.Tensor:
        """``ancestors`` with further nodes below the nodes ``first + above``."""
        known, count = len(self.expanded_parents), len(above)
        seen = torch.eye(known + count, dtype=torch.bool, device=above.device)
        if self.ancestors is not None:
            seen[:known, :known] = self.ancestors
            seen[known:, :known] = self.ancestors[first + above]
        return seen

    def chosen(self) -> torch.Tensor:
        """The candidates that stay, in order, after a -1 for each missing one; then the candidate
        that each expanded node is; then the scores of the first, as the bits of float32."""
        scores = torch.cat(self._scores)
        best = scores.topk(min(self._nodes, len(scores)))
        least = self._ending.least
        unlikely = best.values < (math.log(least) if least > 0 else -math.inf)
        unlikely[0] = False
        # Minus infinity marks a missing candidate.
        stays = (best.values > -torch.inf) & ~unlikely
        self._stay = torch.where(stays, best.indices, -1).sort().values
        kept = scores.index_select(0, self._stay.clamp(min=0)).float()
        return torch.cat([self._stay, *self._expanded_as, kept.view(torch.int32).long()])

    def finish(self, chosen: Sequence[int]) -> GrownTree:
        most = len(self._stay)
        staying, candidate_of, bits = chosen[:most], chosen[most:-most], chosen[-most:]
        kept = [column for column in staying if column >= 0]
        known = array("f", array("i", bits).tobytes())[most - len(kept) :]
        scores: list[float] = []
        node_of: dict[int, int] = {}
        expanded_of = {candidate: index for index, candidate in enumerate(candidate_of)}
        parents: list[int] = []
        for candidate, score in zip(kept, known, strict=True):
            above = self._parents[candidate]
            parent = node_of.get(candidate_of[above]) if above >= 0 else -1
            if parent is None:
                continue  # its parent had the same score and was left out
            node_of[candidate] = len(parents)
            parents.append(parent)
            scores.append(score)
        stay = self._stay[len(staying) - len(kept) :]
        if len(node_of) < len(kept):
            rest = [number for number, candidate in enumerate(kept) if candidate in node_of]
            stay = stay.index_select(0, to_device(rest, stay.device))
        tokens = torch.cat(self._tokens).index_select(0, stay)
        slots = tuple(expanded_of.get(candidate, -1) for candidate in node_of)
        return GrownTree(TokenTree(tokens, tuple(parents)), slots, tuple(scores))
