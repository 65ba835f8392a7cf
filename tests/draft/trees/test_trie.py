"""The trie holds every candidate as a path, each node once, and keeps to its limit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.trees.shape import merge

CANDIDATES = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6)


def paths(tokens: list[int], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_shared_beginnings_share_nodes() -> None:
    tokens, parents = merge([[5, 6, 7], [5, 8], [9], [5, 6]])
    assert tokens == [5, 6, 7, 8, 9]
    assert parents == (-1, 0, 1, 0, -1)


def test_the_first_candidate_goes_first_when_nodes_are_few() -> None:
    assert merge([[5, 6, 7], [5, 8, 9], [5, 6, 7, 1]], max_nodes=4) == ([5, 6, 7, 8], (-1, 0, 1, 0))
    assert merge([[5, 6]], max_nodes=0) == ([], ())


def test_later_candidates_are_cut_after_their_branch() -> None:
    tokens, parents = merge([[5, 6, 7, 8], [5, 9, 9, 9], [1, 2, 3]], max_branch=2)
    assert tokens == [5, 6, 7, 8, 9, 9, 1, 2]
    assert parents == (-1, 0, 1, 2, 0, 4, -1, 6)


@settings(deadline=None)
@given(CANDIDATES, st.integers(0, 12))
def test_nodes_are_the_distinct_beginnings(candidates: list[list[int]], limit: int) -> None:
    prefixes = {tuple(c[:end]) for c in candidates for end in range(1, len(c) + 1)}
    found = paths(*merge(candidates))
    assert set(found) == prefixes
    assert len(found) == len(prefixes)
    limited = paths(*merge(candidates, limit))
    assert len(limited) == min(limit, len(prefixes))
    assert set(limited) <= prefixes
