"""Shapes of static trees, and the best of them for a node budget against all trees there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import chain_parents
from paceline.draft.trees.shape import Shape, best_shape

Path = tuple[int, ...]


def paths_of(shape: Shape) -> set[Path]:
    paths: list[Path] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return set(paths)


def all_shapes(widths: list[int], nodes: int) -> set[frozenset[Path]]:
    """Every set of up to ``nodes`` paths that holds the beginnings of its members."""
    found = {frozenset[Path]()}
    newest = set(found)
    for _ in range(nodes):
        newest = {
            tree | {(*above, rank)}
            for tree in newest
            for above in (*tree, ())
            if len(above) < len(widths)
            for rank in range(widths[len(above)])
            if (*above, rank) not in tree
        }
        found |= newest
    return found


def value(tree: frozenset[Path], accuracy: list[list[float]]) -> float:
    """1 + the sum over nodes of the product of their accuracies, written down plainly."""
    total = 1.0
    for path in tree:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= accuracy[depth][rank]
        total += chance
    return total


@given(
    st.lists(st.lists(st.floats(0.0, 0.45), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_best_shape_is_the_best_of_all_trees(levels: list[list[float]], nodes: int) -> None:
    accuracy = [sorted(level, reverse=True) for level in levels]
    shape = best_shape(accuracy, nodes)
    best = max(value(tree, accuracy) for tree in all_shapes([len(a) for a in accuracy], nodes))
    assert len(shape) <= nodes
    assert value(frozenset(paths_of(shape)), accuracy) == pytest.approx(best)
    assert shape.complete


def test_best_shape_goes_deep_or_wide_as_accuracy_says() -> None:
    sure, unsure = [[0.9, 0.05]] * 3, [[0.3, 0.25, 0.2]] * 3
    assert best_shape(sure, 3).parents == chain_parents(3)
    assert best_shape(unsure, 3).parents == (-1, -1, -1)
    assert len(best_shape([[0.5, 0.0]], 4)) == 1  # no node that could never be accepted
    assert len(best_shape([], 4)) == len(best_shape([[]], 4)) == 0


@pytest.mark.parametrize("levels", [(1, 1, 1), (3,), (2, 2, 1), (3, 1, 2)])
def test_branching_is_every_path_of_ranks(levels: tuple[int, ...]) -> None:
    shape = Shape.branching(levels)
    expected = {
        path
        for depth in range(1, len(levels) + 1)
        for path in itertools.product(*map(range, levels[:depth]))
    }
    assert paths_of(shape) == expected and len(shape) == len(expected)
    assert shape.complete and shape.depth == len(levels)
    assert shape.branches == (max(levels) > 1)


def test_of_paths_adds_what_leads_to_them_and_sorts() -> None:
    shape = Shape.of_paths([(1, 0), (0, 2, 0), (0,)])
    assert paths_of(shape) == {(0,), (1,), (0, 2), (1, 0), (0, 2, 0)}
    assert shape.parents == (-1, -1, 0, 1, 2) and shape.ranks == (0, 1, 2, 0, 0)
    assert Shape.of_paths([(1, 0), (0, 2, 0), (0,)]) == Shape.of_paths([(0, 2, 0), (1, 0)])
    assert Shape.of_paths([]) == Shape((), ())


@pytest.mark.parametrize(
    ("paths", "complete"),
    [([(0,), (1,)], True), ([(1,)], False), ([(0,), (2,)], False), ([(0, 1), (0, 0)], True)],
)
def test_complete_means_no_rank_is_left_out(paths: list[Path], complete: bool) -> None:
    assert Shape.of_paths(paths).complete is complete


@pytest.mark.parametrize("depth", range(5))
def test_cut_keeps_the_first_levels(depth: int) -> None:
    shape = Shape.of_paths([(0, 0, 0), (1, 2), (0, 1)])
    assert paths_of(shape.cut(depth)) == {p for p in paths_of(shape) if len(p) <= depth}


def test_nodes_out_of_order_are_refused() -> None:
    for parents, ranks in (((-1, 0, -1), (0, 0, 1)), ((-1, -1), (1, 0)), ((-1, -1), (0, 0))):
        with pytest.raises(AssertionError, match="level by level"):
            Shape(parents, ranks)
