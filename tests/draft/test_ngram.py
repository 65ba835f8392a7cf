"""Lookups find what brute force finds; trees keep to their bound; bad options are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batch import Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree, is_chain
from paceline.draft.ngram import NGram, NGramDrafter
from paceline.errors import ConfigError


def request(tokens: list[int], prompt: int | None = None, seq_id: int = 0) -> SequenceState:
    seq = SequenceState(seq_id, list(tokens), prompt or len(tokens), SamplingParams(max_tokens=99))
    seq.cached = len(tokens) - 1
    return seq


def propose(drafter: NGramDrafter, seq: SequenceState, length: int = 8) -> TokenTree:
    return drafter.propose(Plan((Slice(seq, seq.num_pending, length),)))[0]


class Forcing:
    """A grammar that forces these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.forced_tokens = lambda path=(): tokens


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_the_latest_longest_match_is_continued() -> None:
    drafter = NGramDrafter("cpu", NGram(min=1, max=3, length=3, candidates=1))
    seq = request([1, 2, 7, 8, 9, 1, 2, 4, 5, 6, 3, 2, 4, 1, 2])
    (offer,) = drafter.lookup([Slice(seq, 1, 8)])
    assert offer is not None and offer.match_length == 2
    tree = propose(drafter, seq)
    assert tree.tokens.tolist() == [4, 5, 6]
    assert tree.parents == (-1, 0, 1)


def test_what_a_grammar_forces_comes_first() -> None:
    """Then comes their continuation; the index holds committed tokens only."""
    drafter = NGramDrafter("cpu", NGram(min=2, max=3, length=6, candidates=1))
    seq = request([1, 2, 3, 7, 8, 9, 5])
    seq.constraint = Forcing([1, 2, 3])
    tree = propose(drafter, seq)
    assert tree.tokens.tolist() == [1, 2, 3, 7, 8, 9] and is_chain(tree.parents)
    assert propose(drafter, seq, 4).tokens.tolist() == [1, 2, 3, 7]
    assert len(propose(drafter, seq, 3)) == 0  # no lookup is needed
    seq.tokens += [1, 2, 3, 7]
    seq.constraint = Forcing([])
    assert propose(drafter, seq).tokens.tolist()[:2] == [8, 9]


def test_a_loop_goes_on() -> None:
    drafter = NGramDrafter("cpu", NGram(min=1, max=4, length=7, candidates=1))
    assert propose(drafter, request([1, 2, 3, 1, 2])).tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_candidates_branch_where_they_differ() -> None:
    drafter = NGramDrafter("cpu", NGram(min=1, max=2, length=4, candidates=3))
    # After "1 2" came 5 6 7 8, before that 5 9 9 9; after "2" alone also 4.
    seq = request([2, 4, 0, 1, 2, 5, 9, 9, 9, 1, 2, 5, 6, 7, 8, 1, 2])
    tree = propose(drafter, seq)
    assert tree.tokens.tolist()[:4] == [5, 6, 7, 8]
    assert paths(tree) == {
        *[(5,), (5, 6), (5, 6, 7), (5, 6, 7, 8)],
        *[(5, 9), (5, 9, 9)],  # two nodes of its own, then it is cut
        *[(4,), (4, 0)],
    }
    assert drafter.max_nodes(4) == 8


@pytest.mark.parametrize(("source", "expected"), [("prompt", 2), ("output", 3), ("both", 3)])
def test_source_says_where_a_continuation_begins(source: str, expected: int) -> None:
    drafter = NGramDrafter("cpu", NGram(min=1, max=2, length=1, candidates=1, source=source))
    seq = request([1, 2, 9], prompt=3)
    assert len(propose(drafter, seq)) == 0
    for token in (1, 3, 1):
        seq.tokens.append(token)
        tree = propose(drafter, seq)
    assert tree.tokens.tolist() == [expected]


def test_an_id_that_comes_back_starts_anew() -> None:
    drafter = NGramDrafter("cpu")
    assert len(propose(drafter, request([5, 6, 7, 5]))) > 0
    drafter.forget(0)
    assert len(propose(drafter, request([5, 1, 2, 3]))) == 0


def test_prefill_chunks_and_length_zero_draft_nothing() -> None:
    drafter = NGramDrafter("cpu")
    chunk = request([1, 2, 1, 2])
    chunk.cached = 0
    trees = drafter.propose(Plan((Slice(chunk, 2, 4), Slice(request([1, 1], seq_id=1), 1, 0))))
    assert [len(tree) for tree in trees] == [0, 0]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=24),
    st.integers(1, 23),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_trees_are_continuations_within_the_bound(
    tokens: list[int], first: int, length: int, candidates: int
) -> None:
    """Token by token, as in decoding, against a search of the whole text."""
    drafter = NGramDrafter("cpu", NGram(min=1, max=3, length=5, candidates=candidates))
    for end in range(min(first, len(tokens) - 1), len(tokens)):
        text = tokens[: end + 1]
        tree = propose(drafter, request(text), length)
        assert len(tree) <= drafter.max_nodes(length)
        assert candidates > 1 or is_chain(tree.parents)
        latest = [
            max((p for p in range(n, len(text)) if text[p - n : p] == text[-n:]), default=None)
            for n in (3, 2, 1)
            if n < len(text)
        ]
        best = next((position for position in latest if position is not None), None)
        if best is None:
            assert len(tree) == 0
            continue
        depth = min(length, 5)
        cycle = text[best:] * depth
        assert tree.tokens[:depth].tolist() == cycle[:depth]
        starts = [p for p in range(1, len(text)) if text[p - 1] == text[-1]]
        possible = {tuple((text[p:] * depth)[:d]) for p in starts for d in range(1, depth + 1)}
        assert paths(tree) <= possible


@pytest.mark.parametrize(
    "options",
    [
        {"min": 0},
        {"min": 3, "max": 2},
        {"length": 0},
        {"max": 257},
        {"candidates": 0},
        {"source": "answer"},
    ],
)
def test_senseless_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="draft 'ngram': "):
        NGram(**options)
