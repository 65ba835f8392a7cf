"""Growing trees level by level. A drafter's pass gives logits after the nodes it was given; these
give candidates; the tree takes some as nodes and says which to expand next::

    logits -> candidates -> nodes, of which some are expanded -> logits -> ...

Static shapes (SpecInfer, Miao et al. 2024) are known beforehand, so nothing waits for the device;
shape.py finds the best one for a node budget. For dynamic trees see dynamic.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Slice, Span
from paceline.core.draws import draft_candidates, draw_kind, top_candidates
from paceline.core.sampling import Rows, is_argmax, is_unadjusted, needs_paths
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, depths_of, is_chain
from paceline.draft.trees.shape import Shape
from paceline.model.backends.base import GrownTree


@dataclass(frozen=True)
class Narrow:
    """Logits ``[R, n]`` of the tokens ``ids`` alone, int64 ``[n]``, ascending, out of ``vocab``:
    enough where the choice is the largest logit (``is_argmax``). A head that knows 8,192 of
    49,152 tokens then costs a sixth per row."""

    logits: torch.Tensor
    ids: torch.Tensor
    vocab: int

    def whole(self) -> torch.Tensor:
        """``[R, vocab]``, minus infinity for the others."""
        return widened(self.logits, self.ids, self.vocab)


def widened(logits: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., n]`` of the tokens ``ids`` over ``width`` tokens, minus infinity for the others."""
    full = logits.new_full((*logits.shape[:-1], width), -torch.inf)
    return full.index_copy_(-1, ids, logits)


Logits = torch.Tensor | Narrow  # [R, vocab], or of some tokens


class Growing(ABC):
    """One tree while it grows.

    ``width``: candidates wanted after each newest expanded node; ``samples``: drawn by
    ``draft_candidates``, else the ``top_candidates``. ``expanded_parents``: the nodes given to the
    drafter so far, as a tree.
    Where only the device knows which they are, ``ancestors`` bool ``[expanded, expanded]`` says
    which nodes a node sees (itself, too), and the parents only have the right depths. ``fresh``
    int64: tokens of the newest expanded nodes. ``above`` int64: the row, among the newest expanded
    nodes before, of each one's parent; None if they are those rows.

    ``base``: rows of the text in the drafter's cache. ``outputs [rows, H]``: an EAGLE head's
    outputs at the newest rows.
    """

    samples: bool

    def __init__(self, item: Slice, width: int, device: torch.device, base: int) -> None:
        self.item, self.width, self.base = item, width, base
        self.outputs: torch.Tensor | None = None
        self.expanded_parents: tuple[int, ...] = ()
        self.ancestors: torch.Tensor | None = None
        self.above: torch.Tensor | None = None
        self.fresh = torch.empty(0, dtype=torch.int64, device=device)
        self._expanded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._tokens: list[torch.Tensor] = []  # of all candidates or nodes, level by level

    def _expand(self, fresh: torch.Tensor, above: torch.Tensor | None) -> None:
        self.fresh, self.above = fresh, above
        self._expanded.append((fresh, above))

    @property
    def depth(self) -> int:
        """Of the newest expanded nodes; 0 before there are any."""
        return sum(depths_of(self.expanded_parents)[-1:])

    @property
    def rows(self) -> int:
        """Of logits, after which it wants candidates."""
        return len(self.fresh) if self.expanded_parents else 1

    def first(self, span: Span) -> Span:
        """What to run before the first candidates; ``span``: the tokens not read yet."""
        return span

    def newest(self, nodes: torch.Tensor | None = None, adapter: Adapter | None = None) -> Span:
        """The newest expanded nodes; ``nodes``: their tokens in the drafter's own vocabulary."""
        parents, fresh = self.expanded_parents, self.fresh if nodes is None else nodes
        seq_id, first_new = self.item.seq.seq_id, len(parents) - len(fresh)
        more = self.ancestors, adapter
        return Span.of(seq_id, self.base, (), parents, fresh, first_new, True, *more)

    def path_of_rows(self) -> torch.Tensor:
        """int64 [rows, depth]: drafted tokens down to each newest expanded node."""
        path: list[torch.Tensor] = []
        rows: torch.Tensor | None = None
        for tokens, above in reversed(self._expanded):
            path.insert(0, tokens if rows is None else tokens[rows])
            if above is not None:
                rows = above if rows is None else above[rows]
        return torch.stack(path, 1) if path else self.fresh.new_empty(self.rows, 0)

    def plain_size(self) -> tuple[int, int, int] | None:
        """Depth, width and nodes of a tree that needs no draws: the likeliest candidates (with a
        seed: the race's winners). None for others."""
        return None

    @abstractmethod
    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        """Take nodes from the candidates ``[rows, >= width]`` after the newest expanded nodes.
        ``weights``: the distributions ``[rows, vocab]`` they were drawn from, or log-probabilities
        of the likeliest. False if the tree is complete."""

    def chosen(self) -> torch.Tensor | None:
        """int64: the part of a complete tree's shape that only the device knows, if any."""
        return None

    @abstractmethod
    def finish(self, chosen: Sequence[int]) -> GrownTree:
        """``chosen``: those values on the host."""


def grow(
    trees: Sequence[Growing],
    logits: Logits,
    forward: Callable[[list[Growing]], Logits],
    generator: torch.Generator | None,
) -> list[GrownTree]:
    """Grow all trees together and finish them; waits for the device at most once, at the end.
    ``logits`` ``[len(trees), vocab]`` follow the committed tokens. ``forward`` runs the ``fresh``
    nodes of some trees and returns the logits after each, ``[rows, vocab]``."""
    growing = trees
    while growing:
        counts = [tree.rows for tree in growing]
        grown = candidates(growing, counts, logits, generator)
        growing = [tree for tree, part in zip(growing, grown, strict=True) if tree.extend(*part)]
        if growing:
            logits = forward(list(growing))
    chosen = [tree.chosen() for tree in trees]
    unknown = [shape for shape in chosen if shape is not None]
    values = iter(torch.cat(unknown).tolist() if unknown else ())
    known = [() if shape is None else tuple(islice(values, len(shape))) for shape in chosen]
    return [tree.finish(shape) for tree, shape in zip(trees, known, strict=True)]


_Part = tuple[torch.Tensor, torch.Tensor | None]


def candidates(
    trees: Sequence[Growing],
    counts: Sequence[int],
    logits: Logits,
    generator: torch.Generator | None,
) -> list[_Part]:
    """Each tree's candidates and their weights, drawn for all trees at once."""
    if isinstance(logits, Narrow):
        ids = logits.ids
        # A static level takes a fixed number of candidates, however few the head knows.
        drawn = max((tree.width for tree in trees if tree.samples), default=0)
        if drawn > len(ids) or not all(is_argmax(tree.item.seq) for tree in trees):
            return candidates(trees, counts, logits.whole(), generator)
        grown = candidates(trees, counts, logits.logits, generator)
        return [(ids[tokens], weights) for tokens, weights in grown]
    kinds = {tree.samples for tree in trees}
    if len(kinds) > 1:
        parts, result = torch.split(logits, list(counts)), dict[int, _Part]()
        for kind in kinds:
            chosen = [i for i, tree in enumerate(trees) if tree.samples is kind]
            rows = torch.cat([parts[i] for i in chosen])
            same_kind, kind_counts = [trees[i] for i in chosen], [counts[i] for i in chosen]
            grown = candidates(same_kind, kind_counts, rows, generator)
            result.update(zip(chosen, grown, strict=True))
        return [result[i] for i in range(len(trees))]
    table, width = _row_table(trees, counts), max(tree.width for tree in trees)
    weights: torch.Tensor | None
    if kinds == {True}:
        tokens, weights = draft_candidates(logits, table, width, generator)
    else:
        tokens, weights = top_candidates(logits, table, min(width, logits.shape[1]))
    probs = [None] * len(trees) if weights is None else torch.split(weights, list(counts))
    return list(zip(torch.split(tokens, list(counts)), probs, strict=True))


def _row_table(trees: Sequence[Growing], counts: Sequence[int]) -> Rows:
    row_trees = [tree for tree, count in zip(trees, counts, strict=True) for _ in range(count)]
    seqs, depths = tuple(t.item.seq for t in row_trees), tuple(tree.depth for tree in row_trees)
    paths = None
    if any(depths) and needs_paths(seqs):
        row_paths, deepest = [tree.path_of_rows() for tree in trees], max(depths)
        pad = torch.nn.functional.pad
        paths = torch.cat([pad(path, (0, deepest - path.shape[1])) for path in row_paths])
    return Rows(seqs, depths, paths)


@dataclass(frozen=True)
class _Level:
    """One level of a static shape: its nodes, and which of them are expanded."""

    rows: torch.Tensor  # int64 [nodes]: among the newest expanded nodes, the parent of each
    picks: torch.Tensor  # int64 [nodes]: row * width + rank
    above: torch.Tensor | None  # int64: rows of the expanded nodes; None is all, in their order
    expanded: torch.Tensor | None  # int64: nodes of the level that have children; None is all
    expanded_parents: tuple[int, ...]  # of all levels up to this one
    nodes: int


@lru_cache(maxsize=512)
def levels_of(shape: Shape, width: int, device: torch.device) -> tuple[_Level, ...]:
    """The levels of a shape whose expanded nodes have ``width`` candidates each."""
    depths, inner = depths_of(shape.parents), set(shape.parents)
    number_of = {-1: -1}  # node -> index among the expanded
    expanded_parents: tuple[int, ...] = ()
    newest = [-1]
    levels = []
    for depth in range(1, shape.depth + 1):
        nodes = [node for node, node_depth in enumerate(depths) if node_depth == depth]
        rows = [newest.index(shape.parents[node]) for node in nodes]
        picks = [row * width + shape.ranks[n] for row, n in zip(rows, nodes, strict=True)]
        kept = [i for i, node in enumerate(nodes) if node in inner]
        above, in_order = [rows[i] for i in kept], list(range(len(newest)))
        newest = [nodes[i] for i in kept]
        for node in newest:
            number_of[node] = len(expanded_parents)
            expanded_parents = (*expanded_parents, number_of[shape.parents[node]])
        levels.append(
            _Level(
                to_device(rows, device),
                to_device(picks, device),
                None if above == in_order else to_device(above, device),
                None if len(kept) == len(nodes) else to_device(kept, device),
                expanded_parents,
                len(nodes),
            )
        )
    return tuple(levels)


@lru_cache(maxsize=512)
def _slots(shape: Shape) -> tuple[int, ...]:
    inner = sorted(set(shape.parents) - {-1})
    number_of = {node: index for index, node in enumerate(inner)}
    return tuple(number_of.get(node, -1) for node in range(len(shape)))


class StaticTree(Growing):
    """Grows into a shape; sampled without replacement (or as a chain) where possible."""

    samples = True

    def __init__(self, item: Slice, shape: Shape, device: torch.device, base: int = 0) -> None:
        super().__init__(item, 1 + max(shape.ranks), device, base)
        self.shape = shape
        self._plan = levels_of(shape, self.width, device)
        self._draw = draw_kind(item.seq, shape.branches)
        assert self._draw is Draw.POINT or shape.complete, "siblings are drawn one after another"
        self._probs: list[torch.Tensor] = []

    def plain_size(self) -> tuple[int, int, int] | None:
        shape, depth = self.shape, self.shape.depth
        chain = is_chain(shape.parents) and not any(shape.ranks)
        return (depth, 1, depth) if chain and is_unadjusted(self.item.seq) else None

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        level = self._plan[len(self._tokens)]
        if tokens.shape == (1, 1) and level.nodes == 1:
            chosen = tokens[0]
        else:
            chosen = tokens[:, : self.width].reshape(-1).index_select(0, level.picks)
        self._tokens.append(chosen)
        if self._draw is not Draw.POINT:
            assert weights is not None
            in_order = level.nodes == len(weights) == 1
            self._probs.append(weights if in_order else weights.index_select(0, level.rows))
        if len(self._tokens) == len(self._plan):
            return False
        fresh = chosen if level.expanded is None else chosen.index_select(0, level.expanded)
        self._expand(fresh, level.above)
        self.expanded_parents = level.expanded_parents
        return True

    def finish(self, chosen: Sequence[int]) -> GrownTree:
        tokens = torch.cat(self._tokens) if len(self._tokens) > 1 else self._tokens[0]
        probs = None
        if self._draw is not Draw.POINT:
            probs = torch.cat(self._probs) if len(self._probs) > 1 else self._probs[0]
        tree = TokenTree(tokens, self.shape.parents, self._draw, probs)
        return GrownTree(tree, _slots(self.shape))
