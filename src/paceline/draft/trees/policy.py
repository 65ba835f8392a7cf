"""Dynamic trees, chains that obey a grammar, and which kind of tree a request gets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.core import transfer
from paceline.core.adapter import Adapter
from paceline.core.batch import Slice, Span
from paceline.core.costs import CostCurve
from paceline.core.draws import draw_kind, draws_unseeded
from paceline.core.sampling import is_unadjusted
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.draft.trees.grow import GrowingTree, StaticTree
from paceline.draft.trees.shape import Shape, best_shape
from paceline.model.backends.base import NO_EARLY_STOP, EarlyStop, GrownTree


class DynamicTree(GrowingTree):
    """A tree whose shape the drafter's probabilities decide (EAGLE-2, Li et al. 2024, arXiv
    2406.16858): expands the ``width`` likeliest nodes of each level, and keeps the ``nodes``
    likeliest of all, without those that are too unlikely.

    A node's score is the log-probability of its path, so no node outranks its parent. Nodes are
    chosen, not sampled, so ``Draw`` is POINT (section 4). Candidate c of a level is a child of node
    ``c // width`` of the frontier. Their indices stay on the device until the trees are complete;
    one transfer then gives all shapes. On the CPU, where reading a tensor does not wait, a tree
    also ends when it is too unlikely that another level is accepted.
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


class GrammarChain(GrowingTree):
    """A chain that obeys a request's grammar. Forced tokens need no pass of their own: they run
    with the token before them. The chain ends with the text, and where ``early_stop`` says."""

    def __init__(
        self, item: Slice, length: int, device: torch.device, base: int, early_stop: EarlyStop
    ) -> None:
        super().__init__(item, 1, device, base)
        self._length, self._draw = length, draw_kind(item.seq)
        self.samples = self._draw is not Draw.POINT
        least = early_stop.level_prob ** (1 / early_stop.power)
        self._min_score = math.log(least) if least > 0 else -math.inf
        self._path: list[int] = []
        self._scores: list[float] = []  # log-probability of the path up to each token
        self._num_run = 0  # tokens of the path that the drafter has run
        self._probs: dict[int, torch.Tensor] = {}  # sampled token's index -> its distribution
        self._append_forced(length - 1)

    def _append_forced(self, max_length: int, score: float = 0.0) -> bool:
        """Append the tokens that the grammar forces after the path, whose score is ``score``, up to
        a path of ``max_length`` tokens. Returns False if the text ends here."""
        constraint = self.item.seq.constraint
        assert constraint is not None
        forced: Sequence[int] | None = ()
        while len(self._path) < max_length and (
            forced := constraint.forced_tokens(tuple(self._path))
        ):
            self._path += forced[: max_length - len(self._path)]
        self._scores += [score] * (len(self._path) - len(self._scores))
        return forced is not None

    @property
    def depth(self) -> int:
        return len(self._path)

    def first_span(self, span: Span) -> Span:
        tokens = [*span.tokens, *self._path]
        self._num_run = len(self._path)
        return Span.of(span.seq_id, span.context, tokens, adapter=span.adapter)

    def frontier_span(
        self, nodes: torch.Tensor | None = None, adapter: Adapter | None = None
    ) -> Span:
        begin, self._num_run = self._num_run, len(self._path)
        tokens = self._path[begin:]
        return Span.of(self.item.seq.seq_id, self.base + begin, tokens, adapter=adapter)

    def drafted_paths(self) -> torch.Tensor:
        return to_device([self._path], self.frontier.device)

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        assert weights is not None
        chance = weights.gather(1, tokens).log() if self.samples else weights
        # The grammar is on the host: one copy has both, which doubles hold exactly.
        number, log_chance = torch.stack([tokens[0, 0].double(), chance[0, 0].double()]).tolist()
        token = int(number)
        if self.samples:
            self._probs[len(self._path)] = weights
        score = sum(self._scores[-1:]) + log_chance
        self._path.append(token)
        continues = self._append_forced(self._length, score)
        return continues and len(self._path) < self._length and score >= self._min_score

    def finish(self, shape: Sequence[int]) -> GrownTree:
        tokens, q = to_device(self._path, self.frontier.device), None
        if self._probs:
            drawn = torch.cat([*self._probs.values()])
            q = torch.nn.functional.one_hot(tokens, drawn.shape[1]).to(drawn.dtype)
            q[to_device([*self._probs], q.device)] = drawn
        parents, slots = chain_parents(len(tokens)), range(len(tokens))
        tree = TokenTree(tokens, parents, self._draw, q, host_copy=tuple(self._path))
        expanded = tuple(slot if slot < self._num_run else -1 for slot in slots)
        return GrownTree(tree, expanded, tuple(self._scores))


_CHAIN = Shape.branching((1,) * 64)
_EVENLY = 8  # levels over which the nodes of a dynamic tree are spread
TYPICAL = (0.6, 0.18, 0.08)  # how often the candidates of a node are right, by rank
_ROWS = 8  # rows over which the cost of one more row is averaged
_SPEEDUP = 1.75  # assumed speedup of drafts that pay, over plain decoding


@dataclass(frozen=True)
class Policy:
    """The trees of one drafter, at most as deep as the draft length and ``levels``; by default
    chains. ``shape``: a static tree. ``nodes``: above 0, dynamic trees of up to so many nodes that
    expand ``width`` nodes per level; per level they have ``width`` nodes, or an eighth of ``nodes``
    if that is more. Requests that are sampled without a seed then get a static tree of as many
    nodes, sampled from q. It is accepted more often than the likeliest tokens, and than a chain
    (embedded pair, temperature 1, four levels: 3.03 tokens a step with 8 nodes, 2.69 with a chain).
    ``shared``: ``nodes`` are for all sequences that decode together, at least one per level for
    each: what pays for one sequence does not pay for each of several.
    """

    shape: Shape = _CHAIN
    nodes: int = 0
    width: int = 4
    levels: int = 64
    shared: bool = False

    def depth(self, length: int) -> int:
        """Levels of a tree for a draft length, which is also the number of passes."""
        return min(length, self.levels, self.nodes or self.shape.depth)

    @property
    def chain(self) -> bool:
        return not self.nodes and self.shape is _CHAIN

    def max_nodes(self, length: int, sequences: int = 1) -> int:
        """The most nodes of each sequence's tree if so many sequences decode together."""
        length = self.depth(length)
        if not self.nodes:
            return len(self.shape.cut(length))
        nodes = max(length, self.nodes // sequences) if self.shared else self.nodes
        per_level = max(self.width, -(-nodes // _EVENLY))
        return min(nodes, per_level * length)

    def max_expanded(self, length: int) -> int:
        """The most nodes that the drafter expands while a tree grows."""
        if not self.nodes:
            return len(self.shape.cut(max(0, length - 1)))
        return max(self.nodes, self.width * max(0, length - 1))

    def new_tree(
        self,
        item: Slice,
        device: torch.device,
        base: int = 0,
        early_stop: EarlyStop = NO_EARLY_STOP,
        follow_grammar: bool = False,
        sequences: int = 1,
    ) -> GrowingTree:
        """An empty tree for a slice with a draft length above 0. ``base`` as in ``GrowingTree``.
        ``follow_grammar``: a ``GrammarChain``. ``sequences``: how many decode together."""
        length = self.depth(item.draft_length)
        if follow_grammar:
            return GrammarChain(item, length, device, base, early_stop)
        if not self.nodes:
            return StaticTree(item, self.shape.cut(length), device, base)
        nodes = self.max_nodes(item.draft_length, sequences)
        if draws_unseeded(item.seq.params):
            return StaticTree(item, shape_for_sampling(nodes, length), device, base)
        max_width = max(1, self.nodes // sequences) if self.shared else self.width
        width = min(self.width, max_width)
        return DynamicTree(item, length, width, nodes, device, base, early_stop)


@lru_cache(maxsize=256)
def shape_for_sampling(nodes: int, length: int) -> Shape:
    """The best static tree for sampled drafts, assuming ``TYPICAL`` acceptance at each level."""
    return best_shape([TYPICAL] * length, nodes)


def break_even_chance(cost: CostCurve) -> float:
    """The chance of acceptance from which one more node pays. ``cost``: seconds of a target forward
    by number of tokens (nodes + 1) of one sequence."""
    row = max(0.0, cost(1 + _ROWS) - cost(1)) / _ROWS
    return min(_SPEEDUP * row / cost(1), 0.5)
