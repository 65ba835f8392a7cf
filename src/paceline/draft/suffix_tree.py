"""A suffix tree over many texts: how often a string occurred, and how it went on.

The leaves are buckets: the suffixes below a string stay an unsorted list of positions until
enough of them differ in the next token, then the list becomes a node with one bucket per token
(a burst trie: Heinz, Zobel and Williams 2002). So a token costs one position and a share of a
node, and text that comes again and again costs positions, but no nodes.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_END = -1  # stands behind every finished text; no token id
_BUCKET = 16  # positions at which a list is first tried for a split
_LATEST = 64  # of the positions in one list so many are looked at when drafting


@dataclass(slots=True, eq=False)
class _Node:
    """An inner string of the tree: its occurrences, and those of each longer string."""

    count: int = 0
    last: int = -1  # position of the latest occurrence
    children: dict[int, _Node | list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A string in the tree: a node, or the positions (a part of a list) where it occurs."""

    below: _Node | list[int]
    depth: int  # tokens of the string


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """A tree of likely continuations; ``score`` is the estimated number of accepted tokens.

    ``match`` is the number of tokens of the text that were found in the suffix tree.
    """

    tokens: list[int]
    parents: tuple[int, ...]
    score: float
    match: int


class SuffixTree:
    """Suffixes of several texts; the newest one may still grow, the oldest may be dropped.

    A token costs O(max_depth) dictionary accesses at worst, in practice a few. Measured on one
    core of a server CPU: 1 microsecond and 90 bytes per token, 30 to 60 microseconds per lookup.
    Strings longer than ``max_depth`` are told apart by their latest occurrences only.
    """

    def __init__(self, max_depth: int = 64) -> None:
        self._max_depth = max_depth
        self._root = _Node()
        self._stream = array("i")  # all texts, each followed by _END when it is finished
        self._base = 0  # position of the stream's first token: positions never change
        self._lengths: deque[int] = deque()  # of the finished texts, oldest first
        self.open_tokens = 0  # of the text that still grows
        # Suffixes of the unfinished text that end in a node: the next token takes them on.
        self._active: list[tuple[int, _Node]] = []

    def __len__(self) -> int:
        """Tokens of all texts."""
        return self._root.count

    # -- growing and shrinking ---------------------------------------------------------------

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (ids from 0) to the newest text."""
        for token in tokens:
            position = self._base + len(self._stream)
            self._stream.append(token)
            self._active.append((position, self._root))
            self._root.count += 1
            self._advance(token)
        self.open_tokens += len(tokens)

    def finish(self) -> None:
        """End the newest text; what is appended from now on is another one."""
        if self.open_tokens:
            self._stream.append(_END)
            self._advance(_END)
            self._active = []
            self._lengths.append(self.open_tokens)
            self.open_tokens = 0

    def _advance(self, token: int) -> None:
        """Take every active suffix one token on; those that reach a list stay there."""
        active: list[tuple[int, _Node]] = []
        end = self._base + len(self._stream)
        for position, node in self._active:
            child = node.children.get(token)
            if child is None:
                node.children[token] = [position]
            elif isinstance(child, _Node):
                child.count += 1
                child.last = position
                active.append((position, child))
            else:
                child.append(position)
                size = len(child)
                # Tried again whenever the list has doubled: the cost is spread over its tokens.
                if size >= _BUCKET and size & (size - 1) == 0 and token != _END:
                    split = self._split(child, end - position)
                    if split is not None:
                        node.children[token] = split
                        active.append((position, split))
        self._active = active

    def _split(self, positions: list[int], depth: int) -> _Node | None:
        """A node in place of a list, unless all its suffixes go on alike or it lies too deep.

        The last position is that of the open text's own suffix, which has not gone on yet.
        """
        if depth >= self._max_depth:
            return None
        stream, shift = self._stream, depth - self._base
        nexts = [stream[position + shift] for position in positions[:-1]]
        if nexts.count(nexts[0]) == len(nexts):
            return None
        node = _Node(len(positions), positions[-1])
        for token, position in zip(nexts, positions, strict=False):
            bucket = node.children.setdefault(token, [])
            assert isinstance(bucket, list)
            bucket.append(position)
        return node

    def drop_oldest(self) -> None:
        """Forget the oldest finished text. There must be one, and no open text."""
        assert self._lengths and not self.open_tokens
        length = self._lengths.popleft()
        for position in range(self._base, self._base + length):
            self._remove(position)
        del self._stream[: length + 1]
        self._base += length + 1

    def _remove(self, position: int) -> None:
        """Take the oldest suffix out of the counts on its way and out of its list."""
        node, index = self._root, position - self._base
        while True:
            node.count -= 1
            token = self._stream[index]
            child = node.children[token]
            if isinstance(child, _Node) and child.count <= _BUCKET // 2:
                child = node.children[token] = sorted(_positions(child))
            if isinstance(child, list):
                break
            node = child
            index += 1
        assert child[0] == position, "lists are in the order of the stream"
        del child[0]
        if not child:
            del node.children[token]

    def texts(self) -> Iterator[Sequence[int]]:
        """The finished texts, oldest first."""
        start = 0
        for length in self._lengths:
            yield self._stream[start : start + length]
            start += length + 1

    # -- looking up ---------------------------------------------------------------------------

    def count(self, string: Sequence[int]) -> int:
        """How often ``string`` (at least one token) occurs in the texts."""
        where: _Node = self._root
        for index, token in enumerate(string):
            child = where.children.get(token)
            if child is None:
                return 0
            if isinstance(child, list):
                return len(self._among(child, string, index + 1))
            where = child
        return where.count

    def _among(self, positions: list[int], string: Sequence[int], known: int) -> list[int]:
        """Those at which all of ``string`` occurs, its first ``known`` tokens being given."""
        rest = array("i", string[known:])
        if not rest:
            return positions
        stream, start, stop = self._stream, known - self._base, len(string) - self._base
        return [p for p in positions if stream[p + start : p + stop] == rest]

    def _find(self, string: Sequence[int]) -> _Place | None:
        """Where ``string`` is, if one of its occurrences goes on."""
        where = self._root
        for index, token in enumerate(string):
            child = where.children.get(token)
            if child is None:
                return None
            if isinstance(child, list):
                found = self._among(child[-_LATEST:], string, index + 1)
                found = self._going_on(found, len(string))
                return _Place(found, len(string)) if found else None
            where = child
        going_on = len(where.children) > (_END in where.children)
        return _Place(where, len(string)) if going_on else None

    def _going_on(self, positions: list[int], depth: int) -> list[int]:
        stream, shift = self._stream, depth - self._base
        limit = len(stream) - shift
        return [p for p in positions if p < limit and stream[p + shift] != _END]

    def _longest(self, text: Sequence[int]) -> _Place | None:
        """The longest suffix of ``text`` that has gone on before.

        If a suffix has, all shorter ones have: a binary search finds the longest.
        """
        best = None
        low, high = 0, min(len(text), self._max_depth)
        while low < high:
            length = (low + high + 1) // 2
            place = self._find(text[len(text) - length :])
            if place is None:
                high = length - 1
            else:
                low, best = length, place
        return best

    def _continuations(self, place: _Place, least: float) -> list[tuple[float, int, _Place]] | None:
        """(share, token, place) of next tokens, likely and recent ones first; None at an end.

        Shares below ``least`` may be left out: the node of a common word has thousands.
        """
        below, depth = place.below, place.depth
        if isinstance(below, _Node):
            children = below.children
        else:
            children = {}
            shift = depth - self._base
            for position in self._going_on(below[-_LATEST:], depth):
                bucket = children.setdefault(self._stream[position + shift], [])
                assert isinstance(bucket, list)
                bucket.append(position)
        counts = {
            token: len(child) if isinstance(child, list) else child.count
            for token, child in children.items()
            if token != _END
        }
        if not counts:
            return None
        total = sum(counts.values())
        found = []
        for token, count in counts.items():
            if count >= least * total:
                child = children[token]
                last = child[-1] if isinstance(child, list) else child.last
                found.append((count, last, token, child))
        found.sort(key=lambda item: item[:2], reverse=True)
        return [
            (count / total, token, _Place(child, depth + 1)) for count, _, token, child in found
        ]

    def speculate(
        self,
        text: Sequence[int],
        length: int,
        max_nodes: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
    ) -> SuffixDraft:
        """The likeliest continuations of the longest suffix of ``text`` that is known.

        Best first by estimated probability, the product of the shares along the path: at most
        ``length`` levels, ``max_nodes`` nodes and ``factor * match + offset`` nodes, none less
        likely than ``min_prob``. Empty if nothing matches.
        """
        place = self._longest(text)
        if place is None:
            return SuffixDraft([], (), 0.0, 0)
        match = place.depth
        budget = min(max_nodes, int(factor * match + offset))
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = []  # tokens from the root to each node
        heap: list[tuple[float, int, int, int, _Place]] = []
        ticket = 0  # equal probabilities: first come, first served
        parent, path, chance, score = -1, list[int](), 1.0, 0.0
        while len(tokens) < budget:
            following: list[tuple[float, int, _Place]] | None = []
            if len(path) < length:
                least = 0.999 * min_prob / chance
                following = self._continuations(place, least)
                if following is None:
                    # The text ends here. As if the path were appended: a loop stays a loop.
                    again = self._longest([*text, *path])
                    following = self._continuations(again, least) if again else []
            for share, token, child in following or ():
                if chance * share < min_prob:
                    break  # the others are no likelier
                ticket += 1
                heapq.heappush(heap, (-chance * share, ticket, parent, token, child))
            if not heap:
                break
            negative, _, above, token, place = heapq.heappop(heap)
            parent, chance = len(tokens), -negative
            path = [*(paths[above] if above >= 0 else ()), token]
            tokens.append(token)
            parents.append(above)
            paths.append(path)
            score += chance
        return SuffixDraft(tokens, tuple(parents), score, match)


def _positions(node: _Node) -> Iterator[int]:
    """All positions below a node, of finished texts."""
    for child in node.children.values():
        if isinstance(child, list):
            yield from child
        else:
            yield from _positions(child)
