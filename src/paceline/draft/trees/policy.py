"""The kind and the size of a request's tree, and the tree along a grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Slice, Span
from paceline.core.costs import CostCurve
from paceline.core.draws import draw_kind, draws_unseeded
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.draft.trees.dynamic import DynamicTree
from paceline.draft.trees.grow import Growing, StaticTree
from paceline.draft.trees.shape import Shape, best_shape
from paceline.model.backends.base import WHOLE, Ending, GrownTree


class GrammarChain(Growing):
    """A chain along a request's grammar. What that forces needs no pass of its own: it is run with
    the token before it. It ends with the text, and where ``ending`` says."""

    def __init__(
        self, item: Slice, length: int, device: torch.device, base: int = 0, ending: Ending = WHOLE
    ) -> None:
        super().__init__(item, 1, device, base)
        self._length, self._draw = length, draw_kind(item.seq)
        self.samples = self._draw is not Draw.POINT
        least = ending.stop ** (1 / ending.power)
        self._least = math.log(least) if least > 0 else -math.inf
        self._path: list[int] = []
        self._scores: list[float] = []  # log-probabilities of the path up to each token
        self._run = 0  # tokens of the path that the drafter has run
        self._probs: dict[int, torch.Tensor] = {}  # of a sampled chain: where it was drawn
        self._force(length - 1)

    def _force(self, most: int, score: float = 0.0) -> bool:
        """Take in what is forced behind a path with this score; False where the text ends."""
        constraint = self.item.seq.constraint
        assert constraint is not None
        forced: Sequence[int] | None = ()
        while len(self._path) < most and (forced := constraint.forced_tokens(tuple(self._path))):
            self._path += forced[: most - len(self._path)]
        self._scores += [score] * (len(self._path) - len(self._scores))
        return forced is not None

    @property
    def depth(self) -> int:
        return len(self._path)

    def first(self, span: Span) -> Span:
        tokens = [*span.tokens, *self._path]
        self._run = len(self._path)
        return Span.of(span.seq_id, span.context, tokens, adapter=span.adapter)

    def newest(self, nodes: torch.Tensor | None = None, adapter: Adapter | None = None) -> Span:
        begin, self._run = self._run, len(self._path)
        tokens = self._path[begin:]
        return Span.of(self.item.seq.seq_id, self.base + begin, tokens, adapter=adapter)

    def path_of_rows(self) -> torch.Tensor:
        return to_device([self._path], self.fresh.device)

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        assert weights is not None
        chance = weights.gather(1, tokens).log() if self.samples else weights
        # A grammar is followed on the host: both in one copy, which doubles hold exactly.
        number, log_chance = torch.stack([tokens[0, 0].double(), chance[0, 0].double()]).tolist()
        token = int(number)
        if self.samples:
            self._probs[len(self._path)] = weights
        score = sum(self._scores[-1:]) + log_chance
        self._path.append(token)
        goes_on = self._force(self._length, score)
        return goes_on and len(self._path) < self._length and score >= self._least

    def finish(self, chosen: Sequence[int]) -> GrownTree:
        tokens, q = to_device(self._path, self.fresh.device), None
        if self._probs:
            drawn = torch.cat([*self._probs.values()])
            q = torch.nn.functional.one_hot(tokens, drawn.shape[1]).to(drawn.dtype)
            q[to_device([*self._probs], q.device)] = drawn
        parents, slots = chain_parents(len(tokens)), range(len(tokens))
        tree = TokenTree(tokens, parents, self._draw, q, known=tuple(self._path))
        run = tuple(slot if slot < self._run else -1 for slot in slots)
        return GrownTree(tree, run, tuple(self._scores))


_CHAIN = Shape.branching((1,) * 64)
_EVENLY = 8  # levels
TYPICAL = (0.6, 0.18, 0.08)  # how often the candidates of a node are right, by rank
_ROWS = 8  # over which the price of a row is averaged
_SPEEDUP = 1.75  # of drafts that pay: a token takes so much less than a plain step


@dataclass(frozen=True)
class Policy:
    """The trees of one drafter, at most as deep as the draft length; by default a chain.

    ``shape``: this static tree. ``nodes``: dynamic trees of up to that many nodes, expanding
    ``width`` a level; shallow ones have fewer (``width`` a level, or an even share of ``nodes`` in
    eight levels). Requests that are sampled without a seed then get a static tree of as many nodes,
    drawn from q: accepted more often than the likeliest tokens, and than a chain (embedded pair,
    temperature 1, four levels: 3.03 tokens a step with 8 nodes, 2.69 with a chain). No tree has
    more than ``levels`` levels. ``shared``: sequences that decode together share out ``nodes``, but
    for one a level: what pays for one sequence does not for each of several.
    """

    shape: Shape = _CHAIN
    nodes: int = 0
    width: int = 4
    levels: int = 64
    shared: bool = False

    def depth(self, length: int) -> int:
        """Levels of a tree for a draft length: passes of the drafter."""
        return min(length, self.levels, self.nodes or self.shape.depth)

    @property
    def chain(self) -> bool:
        return not self.nodes and self.shape is _CHAIN

    def max_nodes(self, length: int, sequences: int = 1) -> int:
        """Most nodes of the tree of each of so many sequences."""
        length = self.depth(length)
        if not self.nodes:
            return len(self.shape.cut(length))
        nodes = max(length, self.nodes // sequences) if self.shared else self.nodes
        per_level = max(self.width, -(-nodes // _EVENLY))
        return min(nodes, per_level * length)

    def max_expanded(self, length: int) -> int:
        """Most nodes that the drafter expands while a tree grows."""
        if not self.nodes:
            return len(self.shape.cut(max(0, length - 1)))
        return max(self.nodes, self.width * max(0, length - 1))

    def start(
        self,
        item: Slice,
        device: torch.device,
        base: int = 0,
        ending: Ending = WHOLE,
        along: bool = False,
        sequences: int = 1,
    ) -> Growing:
        """An empty tree for a sequence with a draft length above 0, of so many that decode;
        ``base`` as in Growing. ``along``: a chain along its grammar."""
        length = self.depth(item.draft_length)
        if along:
            return GrammarChain(item, length, device, base, ending)
        if not self.nodes:
            return StaticTree(item, self.shape.cut(length), device, base)
        nodes = self.max_nodes(item.draft_length, sequences)
        if draws_unseeded(item.seq.params):
            return StaticTree(item, sampled_shape(nodes, length), device, base)
        most = max(1, self.nodes // sequences) if self.shared else self.width
        return DynamicTree(item, length, min(self.width, most), nodes, device, base, ending)


@lru_cache(maxsize=256)
def sampled_shape(nodes: int, length: int) -> Shape:
    """The static tree for drafts that are drawn, with ``TYPICAL`` acceptance at each level."""
    return best_shape([TYPICAL] * length, nodes)


def paying_chance(price: CostCurve) -> float:
    """The chance of acceptance from which a node more pays. ``price``: seconds of a target forward
    over so many tokens of one sequence (nodes + 1)."""
    row = max(0.0, price(1 + _ROWS) - price(1)) / _ROWS
    return min(_SPEEDUP * row / price(1), 0.5)
