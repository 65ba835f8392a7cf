"""The suffix tree counts what brute force counts, whatever was appended and dropped."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.suffix_tree import SuffixTree, _Node

# Few tokens and long texts: lists split, and nodes fall back to lists.
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=8)


def brute(texts: list[list[int]], longest: int) -> Counter[tuple[int, ...]]:
    """Occurrences of every string of up to ``longest`` tokens."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for length in range(1, longest + 1)
        for start in range(len(text) - length + 1)
    )


def check(tree: SuffixTree, texts: list[list[int]]) -> None:
    assert len(tree) == sum(map(len, texts))
    expected = brute(texts, 8)
    for string, count in expected.items():
        assert tree.count(string) == count, string
    for string in list(expected)[:50]:
        other = (*string[:-1], 2 - string[-1])
        assert tree.count(other) == expected.get(other, 0)


def inner(tree: SuffixTree) -> list[_Node]:
    """All nodes below the root."""

    def below(node: _Node) -> list[_Node]:
        children = [child for child in node.children.values() if isinstance(child, _Node)]
        return children + [deeper for child in children for deeper in below(child)]

    return below(tree._root)


@given(TEXTS, st.sampled_from([1, 3, 64]))
@settings(max_examples=60, deadline=None)
def test_counts_equal_brute_force(texts: list[list[int]], depth: int) -> None:
    tree = SuffixTree(depth)
    for text in texts:
        tree.finish()
        for token in text:  # one by one, as decoding does
            tree.extend([token])
    check(tree, texts)


@given(TEXTS, st.sampled_from([2, 64]), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_counts_after_the_oldest_were_dropped(
    texts: list[list[int]], depth: int, gone: int
) -> None:
    tree = SuffixTree(depth)
    held: list[list[int]] = []
    for text in texts:
        tree.extend(text)
        tree.finish()
        held.append(text)
        if len(held) > gone:
            tree.drop_oldest()
            held.pop(0)
    check(tree, held)
    assert all(node.count >= 8 for node in inner(tree)), "fewer occurrences are kept in a list"
    assert [list(text) for text in tree.texts()] == held
    for _ in held:
        tree.drop_oldest()
    assert len(tree) == 0 and not tree._root.children, "nothing is left behind"


def test_a_text_that_comes_again_and_again_costs_no_nodes() -> None:
    tree = SuffixTree()
    for _ in range(100):
        tree.extend(range(50))
        tree.finish()
    assert not inner(tree)
    assert tree.count([7, 8, 9]) == 100


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
    """How the occurrences of ``string`` went on."""
    size = len(string)
    nexts = Counter(
        text[start + size]
        for start in range(len(text) - size)
        if tuple(text[start : start + size]) == string
    )
    return {token: count / nexts.total() for token, count in nexts.items()}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.sampled_from([3, 64]))
@settings(max_examples=60, deadline=None)
def test_speculation_follows_the_longest_match(text: list[int], depth: int) -> None:
    tree = SuffixTree(depth)
    tree.extend(text)
    guess = tree.speculate(text, length=4, max_nodes=9, factor=2.0, offset=1.0)
    assert guess.match == longest_brute(text, depth)
    assert bool(guess.tokens) == (guess.match > 0)
    assert len(guess.tokens) <= min(9, 2 * guess.match + 1)
    # Shares multiply along a path. Where the text ends, the text with the path is matched again.
    total = 0.0
    found: list[tuple[tuple[int, ...], tuple[int, ...], float]] = []  # path, known string, chance
    for token, parent in zip(guess.tokens, guess.parents, strict=True):
        match = tuple(text[len(text) - guess.match :])
        path, known, chance = found[parent] if parent >= 0 else ((), match, 1.0)
        if not shares(text, known):
            longer = [*text, *path]
            ends = (tuple(longer[-length:]) for length in range(min(depth, len(longer)), 0, -1))
            known = next(end for end in ends if shares(text, end))
        chance *= shares(text, known)[token]
        found.append(((*path, token), (*known, token), chance))
        assert chance >= 0.1 - 1e-9
        assert len(path) < 4
        total += chance
    assert abs(guess.score - total) < 1e-9
    chances = [chance for _, _, chance in found]
    assert all(a >= b - 1e-9 for a, b in pairwise(chances)), "best first"
    assert len({path for path, _, _ in found}) == len(found)


def test_frequent_goes_before_recent_and_recent_before_old() -> None:
    tree = SuffixTree()
    for following in (7, 8, 7, 9):
        tree.extend([1, 2, following])
        tree.finish()
    guess = tree.speculate([5, 1, 2], length=1, max_nodes=3, factor=9)
    assert guess.tokens == [7, 9, 8]
    assert abs(guess.score - 1.0) < 1e-9


def test_a_match_never_crosses_texts() -> None:
    tree = SuffixTree()
    tree.extend([1, 2])
    tree.finish()
    tree.extend([3, 4])
    tree.finish()
    assert tree.count([2, 3]) == 0
    assert tree.speculate([1, 2], length=3, max_nodes=3).tokens == []
