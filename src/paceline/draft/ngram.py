"""Prompt lookup: continue as the text did after the latest earlier occurrence of its suffix.

Saxena 2023 (prompt lookup decoding); LLMA, Yang et al. 2023 (arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.batch import Commit, ModelOutput, Plan
from paceline.core.sequence import Sequence as Request
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, chain_parents
from paceline.errors import ConfigError


class NGramIndex:
    """Where each n-gram of a growing text last ended; lookups cost one dictionary access."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end before this position are in the table

    def match(self, tokens: Sequence[int]) -> int | None:
        """Position behind the latest earlier occurrence of the longest known suffix."""
        # The n-grams that end the text itself stay out, or every suffix would match itself.
        for end in range(max(1, self._indexed), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        for length in self._lengths:
            if length < len(tokens):
                known = self._ends.get(tuple(tokens[-length:]))
                if known is not None:
                    return known
        return None


class NGramDrafter:
    """Longest suffix match over prompt and output, of ``longest`` down to ``shortest`` tokens."""

    name = "ngram"
    features: tuple[int, ...] = ()

    def __init__(
        self, device: torch.device | str, shortest: int = 2, longest: int = 4, length: int = 8
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"ngram: min is {shortest} and max is {longest}; use 1 <= min <= max")
        if length < 1:
            raise ConfigError(f"ngram: length is {length}; it must be at least 1")
        self._device = device
        self._bounds = (shortest, longest)
        self._length = length
        self._indices: dict[int, NGramIndex] = {}

    def max_nodes(self, length: int) -> int:
        return min(length, self._length)

    def passes(self, length: int) -> int:
        return 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        return [
            self._lookup(item.seq, self.max_nodes(item.draft_length))
            if item.decodes and item.draft_length
            else TokenTree.empty(self._device)
            for item in plan.slices
        ]

    def _lookup(self, seq: Request, length: int) -> TokenTree:
        index = self._indices.get(seq.seq_id)
        if index is None:
            index = self._indices[seq.seq_id] = NGramIndex(*self._bounds)
        end = index.match(seq.tokens)
        if end is None:
            return TokenTree.empty(self._device)
        # Past the end of the text the match goes on over its own draft: a loop stays a loop.
        period = len(seq.tokens) - end
        found = [seq.tokens[end + i % period] for i in range(length)]
        return TokenTree(to_device(found, self._device), chain_parents(len(found)))

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        pass  # the index catches up from the sequence's own tokens at the next lookup

    def rehearse(self, batch_size: int) -> None:
        pass  # a few dictionary lookups: nothing beside a forward

    def forget(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)
