"""Suffixes found by searching all texts, as the kernels' index finds them in its tables."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from paceline.draft.text_index import _END, TextIndex
from paceline.kernels.lookup import Draft, Ids

_LATEST = 64  # occurrences of a suffix that are compared


class SearchedIndex(TextIndex):
    """Drafts the likeliest continuations, which takes a millisecond."""

    def suffixes(self, new: Ids, tail: Ids, levels: int, nodes: int, memory: Any = None) -> Draft:
        self.extend(new)
        text = list(tail or self._tail())
        drafts = [
            index._grown(text, levels, nodes) for index in (self, memory) if index is not None
        ]
        return max(drafts, key=lambda ends: ends[0])[1]

    def _longest(self, text: Sequence[int]) -> tuple[list[int], int]:
        """The latest occurrences of the longest suffix, and its length. Only occurrences of the
        longest match of the known lengths are compared: older, longer ones can be missed."""
        for length in reversed(self.rule.lengths):
            positions = self._latest_matches(text, length, _LATEST)
            if positions:
                matches = [self._match(text, begin) for begin in positions]
                best = max(matches)
                return [
                    p for p, match in zip(positions, matches, strict=True) if match == best
                ], best
        return [], 0

    def _match(self, text: Sequence[int], end: int) -> int:
        """Tokens of the text's end that stand before an occurrence."""
        most = min(end, len(text), self.rule.depth)
        pairs = ((self._stream[end - back], text[-back]) for back in range(1, most + 1))
        return next((n for n, (pair, other) in enumerate(pairs) if pair != other), most)

    def _grown(self, text: list[int], levels: int, nodes: int) -> tuple[float, Draft]:
        """A draft, and the expected number of its tokens that are accepted."""
        stream, rule = self._stream, self.rule
        positions, match = self._longest(text)
        nodes = min(nodes, int(rule.factor * match + rule.offset)) if match else 0
        tokens, parents, paths = list[int](), list[int](), list[list[int]]()
        heap: list[tuple[float, int, int, int, list[int]]] = []
        ticket = 0  # breaks ties: first come, first served
        path, chance, score = list[int](), 1.0, 0.0
        while len(tokens) < nodes:
            if len(path) < levels:
                positions = [p for p in positions if p < len(stream) and stream[p] != _END]
                if not positions:  # where the text ends: as if the path were appended
                    positions, _ = self._longest([*text, *path])
                following: dict[int, list[int]] = {}
                for begin in positions:
                    following.setdefault(stream[begin], []).append(begin + 1)
                # Frequent ones first, then recent ones.
                for token, behind in sorted(following.items(), key=lambda item: -len(item[1])):
                    share = len(behind) / len(positions)
                    if chance * share < rule.min_prob:
                        break  # the others are no likelier
                    ticket += 1
                    parent = len(tokens) - 1 if path else -1
                    heapq.heappush(heap, (-chance * share, ticket, parent, token, behind))
            if not heap:
                break
            negative, _, parent, token, positions = heapq.heappop(heap)
            path, chance = [*(paths[parent] if parent >= 0 else ()), token], -negative
            tokens.append(token)
            parents.append(parent)
            paths.append(path)
            score += chance
        return score, (tokens, tuple(parents), match)
