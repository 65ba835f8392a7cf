"""Growing draft trees level by level. A pass of the drafter gives logits after the frontier, the
nodes expanded last. Of the candidates, the tree takes some as nodes and expands some of these::

    logits -> candidates -> nodes, of which some are the next frontier -> logits -> ...

The shapes of static trees (SpecInfer, Miao et al. 2024) are known beforehand, so nothing waits for
the device; shape.py finds the best one for a node budget. For dynamic trees see policy.py.
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
class ReducedLogits:
    """Logits ``[R, n]`` of only the tokens ``ids``, int64 ``[n]``, ascending, out of ``vocab``.

    They suffice where the candidates are the largest logits (``is_argmax``). A head that
    knows 8,192 of 49,152 tokens then costs a sixth per row."""

    logits: torch.Tensor
    ids: torch.Tensor
    vocab: int

    def full(self) -> torch.Tensor:
        """``[R, vocab]``, minus infinity for the other tokens."""
        return scatter_to_vocabulary(self.logits, self.ids, self.vocab)


def scatter_to_vocabulary(logits: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """``[..., n]`` of the tokens ``ids`` as ``[..., vocab]``, minus infinity for the others."""
    full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return full.index_copy_(-1, ids, logits)


Logits = torch.Tensor | ReducedLogits  # of all tokens [R, vocab], or of some


class GrowingTree(ABC):
    """A tree while it grows. Its frontier is the nodes expanded last.

    ``width``: candidates wanted after each frontier node. They are drawn by ``draft_candidates`` if
    ``samples``, else ``top_candidates``. ``frontier`` int64: the tokens of the frontier.
    ``parent_rows`` int64: for each frontier node the index of its parent in the frontier before;
    None if these are 0, 1, 2, ...

    ``expanded_parents``: parents of all nodes expanded so far, numbered in the order of expansion.
    In dynamic trees on a device the host does not know the parents. Then these only have the right
    depths, and the mask ``ancestors`` bool ``[expanded, expanded]`` says which nodes a node attends
    to, itself included.

    ``base``: number of rows of the text in the drafter's cache. ``outputs [rows, H]``: outputs of
    an EAGLE head at the frontier.
    """

    samples: bool

    def __init__(self, item: Slice, width: int, device: torch.device, base: int) -> None:
        self.item, self.width, self.base = item, width, base
        self.outputs: torch.Tensor | None = None
        self.expanded_parents: tuple[int, ...] = ()
        self.ancestors: torch.Tensor | None = None
        self.parent_rows: torch.Tensor | None = None
        self.frontier = torch.empty(0, dtype=torch.int64, device=device)
        self._expanded: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # frontiers so far
        self._tokens: list[torch.Tensor] = []  # of all candidates or nodes, level by level

    def _expand(self, frontier: torch.Tensor, parent_rows: torch.Tensor | None) -> None:
        self.frontier, self.parent_rows = frontier, parent_rows
        self._expanded.append((frontier, parent_rows))

    @property
    def depth(self) -> int:
        """Depth of the frontier; 0 before there is one."""
        return sum(depths_of(self.expanded_parents)[-1:])

    @property
    def rows(self) -> int:
        """Number of rows of logits that the next ``extend`` is about."""
        return len(self.frontier) if self.expanded_parents else 1

    def first_span(self, span: Span) -> Span:
        """What the drafter runs before the first level. ``span``: the tokens it has not seen."""
        return span

    def frontier_span(
        self, nodes: torch.Tensor | None = None, adapter: Adapter | None = None
    ) -> Span:
        """The frontier as rows to run. ``nodes``: its tokens in the drafter's own vocabulary."""
        parents, tokens = self.expanded_parents, self.frontier if nodes is None else nodes
        seq_id, first_new = self.item.seq.seq_id, len(parents) - len(tokens)
        more = self.ancestors, adapter
        return Span.of(seq_id, self.base, (), parents, tokens, first_new, True, *more)

    def drafted_paths(self) -> torch.Tensor:
        """int64 ``[rows, depth]``: the drafted tokens down to each frontier node."""
        path: list[torch.Tensor] = []
        rows: torch.Tensor | None = None
        for tokens, parent_rows in reversed(self._expanded):
            path.insert(0, tokens if rows is None else tokens[rows])
            if parent_rows is not None:
                rows = parent_rows if rows is None else parent_rows[rows]
        return torch.stack(path, 1) if path else self.frontier.new_empty(self.rows, 0)

    def growth_size(self) -> tuple[int, int, int] | None:
        """Depth, width and nodes, if a backend's ``TreeGrower`` can grow the tree in one call."""
        return None

    @abstractmethod
    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        """Take nodes from the candidates ``tokens [rows, >= width]`` after the frontier.
        ``weights``: the distributions ``[rows, vocab]`` from which they were drawn, or the
        log-probabilities of the likeliest. Returns False if the tree is complete."""

    def shape_on_device(self) -> torch.Tensor | None:
        """int64: what only the device knows of a complete tree's shape, if anything."""
        return None

    @abstractmethod
    def finish(self, shape: Sequence[int]) -> GrownTree:
        """The complete tree. ``shape``: the values of ``shape_on_device`` on the host."""


def grow(
    trees: Sequence[GrowingTree],
    logits: Logits,
    forward: Callable[[list[GrowingTree]], Logits],
    generator: torch.Generator | None,
) -> list[GrownTree]:
    """Grow all trees together and finish them; waits for the device at most once, at the end.
    ``logits [len(trees), vocab]`` follow the committed tokens. ``forward`` runs the frontiers of
    some trees and returns the logits after each node, ``[rows, vocab]``."""
    growing = trees
    while growing:
        counts = [tree.rows for tree in growing]
        drawn = tree_candidates(growing, counts, logits, generator)
        growing = [tree for tree, part in zip(growing, drawn, strict=True) if tree.extend(*part)]
        if growing:
            logits = forward(list(growing))
    on_device = [tree.shape_on_device() for tree in trees]
    unknown = [shape for shape in on_device if shape is not None]
    values = iter(torch.cat(unknown).tolist() if unknown else ())
    known = [() if shape is None else tuple(islice(values, len(shape))) for shape in on_device]
    return [tree.finish(shape) for tree, shape in zip(trees, known, strict=True)]


_Candidates = tuple[torch.Tensor, torch.Tensor | None]  # the arguments of GrowingTree.extend


def tree_candidates(
    trees: Sequence[GrowingTree],
    counts: Sequence[int],
    logits: Logits,
    generator: torch.Generator | None,
) -> list[_Candidates]:
    """The candidates of each tree, drawn for all trees at once. ``counts``: each tree's rows."""
    if isinstance(logits, ReducedLogits):
        ids = logits.ids
        # A level of a static tree takes a fixed number of candidates, even if the head knows fewer.
        needed = max((tree.width for tree in trees if tree.samples), default=0)
        if needed > len(ids) or not all(is_argmax(tree.item.seq) for tree in trees):
            return tree_candidates(trees, counts, logits.full(), generator)
        drawn = tree_candidates(trees, counts, logits.logits, generator)
        return [(ids[tokens], weights) for tokens, weights in drawn]
    kinds = {tree.samples for tree in trees}
    if len(kinds) > 1:  # each kind by itself
        parts, result = torch.split(logits, list(counts)), dict[int, _Candidates]()
        for kind in kinds:
            indices = [i for i, tree in enumerate(trees) if tree.samples is kind]
            rows = torch.cat([parts[i] for i in indices])
            same_kind, kind_counts = [trees[i] for i in indices], [counts[i] for i in indices]
            drawn = tree_candidates(same_kind, kind_counts, rows, generator)
            result.update(zip(indices, drawn, strict=True))
        return [result[i] for i in range(len(trees))]
    table, width = _row_table(trees, counts), max(tree.width for tree in trees)
    weights: torch.Tensor | None
    if kinds == {True}:
        tokens, weights = draft_candidates(logits, table, width, generator)
    else:
        tokens, weights = top_candidates(logits, table, min(width, logits.shape[1]))
    probs = [None] * len(trees) if weights is None else torch.split(weights, list(counts))
    return list(zip(torch.split(tokens, list(counts)), probs, strict=True))


def _row_table(trees: Sequence[GrowingTree], counts: Sequence[int]) -> Rows:
    row_trees = [tree for tree, count in zip(trees, counts, strict=True) for _ in range(count)]
    seqs, depths = tuple(t.item.seq for t in row_trees), tuple(tree.depth for tree in row_trees)
    paths = None
    if any(depths) and needs_paths(seqs):
        row_paths, deepest = [tree.drafted_paths() for tree in trees], max(depths)
        pad = torch.nn.functional.pad
        paths = torch.cat([pad(path, (0, deepest - path.shape[1])) for path in row_paths])
    return Rows(seqs, depths, paths)


@dataclass(frozen=True)
class _Level:
    """One level of a static shape: its nodes, and which of them are the next frontier."""

    rows: torch.Tensor  # int64 [nodes]: each node's parent, as an index in the frontier
    picks: torch.Tensor  # int64 [nodes]: the node's candidate, row * width + rank
    parent_rows: torch.Tensor | None  # of the next frontier, as in GrowingTree
    expanded: torch.Tensor | None  # int64: nodes of the level that have children; None: all
    expanded_parents: tuple[int, ...]  # of all expanded nodes up to this level
    nodes: int


@lru_cache(maxsize=512)
def levels_of(shape: Shape, width: int, device: torch.device) -> tuple[_Level, ...]:
    """The levels of a shape whose expanded nodes have ``width`` candidates each."""
    depths, inner = depths_of(shape.parents), set(shape.parents)
    number_of = {-1: -1}  # node -> index among the expanded nodes
    expanded_parents: tuple[int, ...] = ()
    frontier = [-1]
    levels = []
    for depth in range(1, shape.depth + 1):
        nodes = [node for node, node_depth in enumerate(depths) if node_depth == depth]
        rows = [frontier.index(shape.parents[node]) for node in nodes]
        picks = [row * width + shape.ranks[n] for row, n in zip(rows, nodes, strict=True)]
        kept = [i for i, node in enumerate(nodes) if node in inner]
        parent_rows, in_order = [rows[i] for i in kept], list(range(len(frontier)))
        frontier = [nodes[i] for i in kept]
        for node in frontier:
            number_of[node] = len(expanded_parents)
            expanded_parents = (*expanded_parents, number_of[shape.parents[node]])
        levels.append(
            _Level(
                to_device(rows, device),
                to_device(picks, device),
                None if parent_rows == in_order else to_device(parent_rows, device),
                None if len(kept) == len(nodes) else to_device(kept, device),
                expanded_parents,
                len(nodes),
            )
        )
    return tuple(levels)


@lru_cache(maxsize=512)
def _slots(shape: Shape) -> tuple[int, ...]:
    """``GrownTree.slots``: each node's index among the expanded nodes, -1 without children."""
    inner = sorted(set(shape.parents) - {-1})
    number_of = {node: index for index, node in enumerate(inner)}
    return tuple(number_of.get(node, -1) for node in range(len(shape)))


class StaticTree(GrowingTree):
    """A tree that grows into ``shape``. Where the request allows it, siblings are sampled without
    replacement (in a chain: the tokens are sampled)."""

    samples = True

    def __init__(self, item: Slice, shape: Shape, device: torch.device, base: int = 0) -> None:
        super().__init__(item, 1 + max(shape.ranks), device, base)
        self.shape = shape
        self._plan = levels_of(shape, self.width, device)
        self._draw = draw_kind(item.seq, shape.branches)
        assert self._draw is Draw.POINT or shape.complete, "siblings are drawn one after another"
        self._probs: list[torch.Tensor] = []

    def growth_size(self) -> tuple[int, int, int] | None:
        shape, depth = self.shape, self.shape.depth
        chain = is_chain(shape.parents) and not any(shape.ranks)
        return (depth, 1, depth) if chain and is_unadjusted(self.item.seq) else None

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        level = self._plan[len(self._tokens)]
        if tokens.shape == (1, 1) and level.nodes == 1:
            nodes = tokens[0]
        else:
            nodes = tokens[:, : self.width].reshape(-1).index_select(0, level.picks)
        self._tokens.append(nodes)
        if self._draw is not Draw.POINT:
            assert weights is not None
            in_order = level.nodes == len(weights) == 1
            self._probs.append(weights if in_order else weights.index_select(0, level.rows))
        if len(self._tokens) == len(self._plan):
            return False
        frontier = nodes if level.expanded is None else nodes.index_select(0, level.expanded)
        self._expand(frontier, level.parent_rows)
        self.expanded_parents = level.expanded_parents
        return True

    def finish(self, shape: Sequence[int]) -> GrownTree:
        tokens = torch.cat(self._tokens) if len(self._tokens) > 1 else self._tokens[0]
        probs = None
        if self._draw is not Draw.POINT:
            probs = torch.cat(self._probs) if len(self._probs) > 1 else self._probs[0]
        tree = TokenTree(tokens, self.shape.parents, self._draw, probs)
        return GrownTree(tree, _slots(self.shape))
