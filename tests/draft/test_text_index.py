"""Searching finds what brute force finds, and the kernels' index drafts what searching drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.text_index import TextIndex, open_index
from paceline.kernels.lookup import Lookup, NativeTextIndex, functions
from support.searched_index import SearchedIndex

LENGTHS = (1, 2, 4, 8, 16, 32)
SUFFIXES = Lookup(LENGTHS, 64, factor=2.0, offset=1.0)

# -- by brute force ---------------------------------------------------------------------------


def longest_brute(text: list[int], depth: int) -> int:
    """Length of the longest suffix that occurs earlier."""
    lengths = [
        length
        for length in range(1, min(depth, len(text) - 1) + 1)
        for start in range(len(text) - length)
        if text[start : start + length] == text[-length:]
    ]
    return max(lengths, default=0)


def shares(text: list[int], string: tuple[int, ...]) -> dict[int, float]:
    """Share of each token among those that follow the occurrences of ``string``."""
    size = len(string)
    nexts = Counter(
        text[start + size]
        for start in range(len(text) - size)
        if tuple(text[start : start + size]) == string
    )
    return {token: count / nexts.total() for token, count in nexts.items()}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.sampled_from([3, 64]))
@settings(max_examples=60, deadline=None)
def test_suffixes_follow_the_longest_match(text: list[int], depth: int) -> None:
    lengths = tuple(length for length in LENGTHS if length <= depth)
    index = SearchedIndex(Lookup(lengths, depth, factor=2.0, offset=1.0))
    tokens, parents, matched = index.suffixes(text, (), levels=4, nodes=9)
    assert matched == longest_brute(text, depth)
    assert bool(tokens) == (matched > 0)
    assert len(tokens) <= min(9, 2 * matched + 1)
    # Shares multiply along a path. Where the text ends, the text with the path is matched again.
    found: list[tuple[tuple[int, ...], tuple[int, ...], float]] = []  # path, known string, chance
    for token, parent in zip(tokens, parents, strict=True):
        match = tuple(text[len(text) - matched :])
        path, known, chance = found[parent] if parent >= 0 else ((), match, 1.0)
        if not shares(text, known):
            longer = [*text, *path]
            ends = (tuple(longer[-length:]) for length in range(min(depth, len(longer)), 0, -1))
            known = next(end for end in ends if shares(text, end))
        chance *= shares(text, known)[token]
        found.append(((*path, token), (*known, token), chance))
        assert chance >= 0.1 - 1e-9
        assert len(path) < 4
    chances = [chance for _, _, chance in found]
    assert all(a >= b - 1e-9 for a, b in pairwise(chances)), "best first"
    assert len({path for path, _, _ in found}) == len(found)


def test_frequent_goes_before_recent_and_recent_before_old() -> None:
    index = SearchedIndex(Lookup(LENGTHS, 64, factor=9.0))
    for following in (7, 8, 7, 9):
        index.extend([1, 2, following])
        index.finish()
    assert index.suffixes((), [5, 1, 2], 1, 3)[0] == [7, 9, 8]


def test_a_match_never_crosses_texts() -> None:
    index = SearchedIndex(SUFFIXES)
    for text in ([1, 2], [3, 4]):
        index.extend(text)
        index.finish()
    assert index.suffixes((), [1, 2], 3, 3) == ([], (), 0)
    assert index.suffixes((), [2, 3], 3, 3) == ([4], (-1,), 1)


def test_the_better_of_two_texts_drafts() -> None:
    own, memory = SearchedIndex(SUFFIXES), SearchedIndex(SUFFIXES)
    memory.extend([1, 2, 3, 4, 5, 6, 7])
    assert own.suffixes([3, 9, 2, 3], (), 4, 4, memory)[0] == [4, 5, 6, 7]
    assert own.suffixes((), (), 4, 4)[0] == [9, 2, 3]


# -- the kernels' -----------------------------------------------------------------------------

needs_kernels = pytest.mark.skipif(functions() is None, reason="the kernels cannot be had here")


class Both:
    """A searching and a native index that get the same calls, and must give the same answers."""

    def __init__(self, rule: Lookup) -> None:
        self.plain = SearchedIndex(rule)
        self.native: Any = NativeTextIndex(functions(), rule)

    def tell(self, name: str, *told: Any) -> None:
        getattr(self.plain, name)(*told)
        getattr(self.native, name)(*told)
        assert len(self.plain) == len(self.native)
        assert self.plain.open_tokens == self.native.open_tokens

    def ask(self, name: str, *asked: Any, memory: Both | None = None) -> Any:
        plain, native = ((), ()) if memory is None else ((memory.plain,), (memory.native,))
        expected = getattr(self.plain, name)(*asked, *plain)
        assert getattr(self.native, name)(*asked, *native) == expected
        assert self.plain.open_tokens == self.native.open_tokens
        return expected

    def same_texts(self) -> list[list[int]]:
        texts = [[list(text) for text in index.texts()] for index in (self.plain, self.native)]
        assert texts[0] == texts[1]
        return texts[0]


TEXT = st.lists(st.integers(0, 2), max_size=40)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "finish", "drop", "ask", "ask", "end"]), TEXT),
    max_size=30,
)


@needs_kernels
@given(ACTIONS, st.sampled_from([1, 5, 64]), st.sampled_from([0.01, 0.1, 0.4]), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_the_kernels_draft_what_searching_drafts(
    actions: list[tuple[str, list[int]]], depth: int, least: float, nodes: int
) -> None:
    lengths = tuple(length for length in LENGTHS if length <= depth)
    rule = Lookup(lengths, depth, factor=1.5, offset=2.0, min_prob=least)
    memory = Both(rule)
    for action, tokens in actions:
        if action == "extend":
            memory.tell("extend", tokens)
        elif action == "finish":
            memory.tell("finish")
        elif action == "drop" and memory.same_texts():
            memory.tell("drop_oldest")
        elif action == "ask":
            own = Both(rule)
            for cut in range(0, len(tokens), 7):
                own.ask("suffixes", tokens[cut : cut + 7], (), 5, nodes, memory=memory)
        elif action == "end":
            memory.ask("suffixes", (), tokens, 5, nodes)
    memory.same_texts()


@needs_kernels
@given(
    TEXT,
    st.lists(TEXT, max_size=6),
    st.sampled_from([(1, 4), (2, 3), (3, 9)]),
    st.sampled_from([{}, {"first": 20}, {"stop": 20}]),
    st.integers(0, 12),
)
@settings(max_examples=100, deadline=None)
def test_the_kernels_find_the_same_ngrams(
    prompt: list[int], parts: list[list[int]], ends: tuple[int, int], bound: Any, nodes: int
) -> None:
    own = Both(Lookup(tuple(range(ends[0], ends[1] + 1)), ends[1], **bound))
    own.tell("extend", prompt)
    for part in parts:
        own.ask("ngrams", part, (), 5, nodes)
        own.ask("ngrams", (), part, 5, nodes)


def zipf(chooser: random.Random, length: int, vocabulary: int) -> list[int]:
    return [int(vocabulary * chooser.random() ** 4) for _ in range(length)]


@needs_kernels
@pytest.mark.parametrize("vocabulary", [1, 3, 50, 5000])
def test_long_texts_that_come_again(vocabulary: int) -> None:
    """More occurrences than are looked at, grown tables, and a memory that goes round."""
    chooser = random.Random(vocabulary)
    memory, known = Both(SUFFIXES), list[list[int]]()
    ngrams = Lookup((1, 2, 3, 4), 4)
    for number in range(60):
        text = zipf(chooser, chooser.choice([3, 100, 700]), vocabulary)
        if known and number % 3:
            old = chooser.choice(known)
            text = [*old[len(old) // 2 :], *text[:50], *old]
        known = [*known[-9:], text[-900:]]
        own, grams = Both(SUFFIXES), Both(ngrams)
        own.tell("extend", text[:-20])
        grams.tell("extend", text[:-20])
        for place in range(max(0, len(text) - 20), len(text), 5):
            own.ask("suffixes", text[place : place + 5], (), 8, 10, memory=memory)
            grams.ask("ngrams", text[place : place + 5], (), 8, 12)
        memory.tell("extend", text)
        memory.tell("finish")
        while len(memory.plain) > 5000:
            memory.tell("drop_oldest")
    held = memory.same_texts()
    assert sum(map(len, held)) == len(memory.native) > 100
    while memory.same_texts():
        memory.tell("drop_oldest")
    assert memory.ask("suffixes", (), known[-1][-70:], 8, 8) == ([], (), 0)


@needs_kernels
def test_a_memory_that_goes_round_takes_no_more() -> None:
    chooser, memory = random.Random(1), NativeTextIndex(functions(), SUFFIXES)
    sizes: list[int] = []
    for number in range(600):
        memory.extend(zipf(chooser, 100, 5000))
        memory.finish()
        if len(memory) > 10_000:
            memory.drop_oldest()
        if number >= 150:
            sizes.append(memory.held_bytes)
    assert sizes[-1] == sizes[0] < 3_000_000


def test_without_kernels_texts_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "off")
    index = open_index(SUFFIXES)
    assert isinstance(index, TextIndex)
    assert index.suffixes([1, 2, 3, 1, 2], (), 3, 3)[0] == [3, 1, 2]
    ends: Sequence[int] = (1, 2)
    assert index.ngrams((), ends, 2, 4)[0] == [3, 1]


def test_without_kernels_the_longer_match_drafts() -> None:
    own, memory = TextIndex(SUFFIXES), TextIndex(SUFFIXES)
    for text in ([8, 9], [1, 2, 3, 4]):
        memory.extend(text)
        memory.finish()
    assert own.suffixes([3, 9, 2, 3], (), 4, 6, memory) == ([4], (-1,), 2)
    assert own.suffixes([9], (), 2, 4, memory)[:1] == ([2, 3],)
