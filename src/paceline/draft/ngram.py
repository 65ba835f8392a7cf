"""Prompt lookup: continue as the text did after earlier occurrences of its suffix.

Saxena 2023 (prompt lookup decoding); LLMA, Yang et al. 2023 (arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Slice
from paceline.core.sequence import SequenceView
from paceline.draft.base import LookupDrafter
from paceline.draft.spec import DraftSpec, Loading, Prepared
from paceline.draft.trees.trie import merge

SOURCES = ("prompt", "output", "both")

_KEPT = 4  # latest occurrences of an n-gram: on our prompts more of them gained nothing
_BRANCH = 2  # nodes of each candidate after the first: it is there for the likely early misses


class NGramIndex:
    """Where each n-gram of a growing text last ended; lookups cost a few dictionary accesses."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        # Tuples of numbers: unlike lists they are nothing to the garbage collector.
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._indexed = 1  # n-grams that end before this position are in the table

    def missing(self, tokens: Sequence[int], allowed: range) -> range:
        """Ends of n-grams that have come to have a continuation; those ``allowed``.

        The n-grams that end the text itself stay out, or every suffix would match itself.
        """
        return range(max(self._indexed, allowed.start), min(len(tokens), allowed.stop))

    def extend(self, tokens: Sequence[int], allowed: range, most: int | None = None) -> int:
        """Take in the n-grams with the next ``most`` missing ends; returns how many there were."""
        ends_here = self.missing(tokens, allowed)[:most]
        if not ends_here:
            return 0
        begin = max(0, ends_here.start - self._lengths[0])
        text, table = tuple(tokens[begin : ends_here.stop]), self._ends
        for end in ends_here:
            for length in self._lengths:
                if length <= end:
                    ngram = text[end - length - begin : end - begin]
                    table[ngram] = (*table.get(ngram, ())[1 - _KEPT :], end)
        self._indexed = ends_here.stop
        return len(ends_here)

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where the suffix occurred: (position behind it, length), longest first, then latest."""
        seen: set[int] = set()
        for length in self._lengths:
            if length < len(tokens):
                for end in reversed(self._ends.get(tuple(tokens[-length:]), ())):
                    if end not in seen:
                        seen.add(end)
                        yield end, length


@dataclass(frozen=True, kw_only=True)
class NGram(DraftSpec):
    """Longest suffix matches over prompt and output, of ``max`` down to ``min`` tokens.

    The first candidate, ``length`` tokens after the latest occurrence of the longest match, is a
    chain. With ``candidates`` above 1 the continuations of earlier occurrences and shorter matches
    branch off where they differ from it, together at most two nodes for each further candidate.
    ``source`` says where a continuation may begin: in the prompt, in the output, or in both.
    """

    kind = "ngram"
    page = "ngram.md"
    natural_length = 8
    looks_up = True
    tried = "always"
    examples = ("ngram:max=3,length=6,candidates=1", "ngram:candidates=4")

    min: int = 1
    max: int = 4
    length: int = 8
    candidates: int = 3
    source: str = "both"

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise self.refuse(f"min is {self.min} and max is {self.max}; use 1 <= min <= max")
        for key, value in (("length", self.length), ("candidates", self.candidates)):
            if value < 1:
                raise self.refuse(f"{key} is {value}; it must be at least 1")
        if self.source not in SOURCES:
            raise self.refuse(f"source is {self.source!r}; use one of {', '.join(SOURCES)}")

    def prepare(self, loading: Loading) -> Prepared:
        return Prepared(lambda context: NGramDrafter(context.target.device, self))


class NGramDrafter(LookupDrafter):
    """Proposes what ``spec`` describes, from one index for each sequence."""

    name = "ngram"

    def __init__(self, device: torch.device | str, spec: NGram | None = None) -> None:
        super().__init__(device)
        self._spec = spec or NGram()
        self._indices: dict[int, NGramIndex] = {}
        self._matched: dict[int, int] = {}

    def max_nodes(self, length: int) -> int:
        levels = min(length, self._spec.length)
        return levels + (self._spec.candidates - 1) * min(levels, _BRANCH)

    def guess(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        seq = item.seq
        levels = min(item.draft_length, self._spec.length)
        matches = list(self._index(seq).matches(seq.tokens))
        self._matched[seq.seq_id] = matches[0][1] if matches else 0
        found = (_continuation(seq.tokens, end, levels) for end, _ in matches)
        return merge(found, self.max_nodes(item.draft_length), _BRANCH)

    def unread(self, seq: SequenceView) -> int:
        return len(self._index(seq).missing(seq.tokens, self._allowed(seq)))

    def read(self, seq: SequenceView, most: int) -> int:
        return self._index(seq).extend(seq.tokens, self._allowed(seq), most)

    def _index(self, seq: SequenceView) -> NGramIndex:
        index = self._indices.get(seq.seq_id)
        if index is None:
            index = NGramIndex(self._spec.min, self._spec.max)
            self._indices[seq.seq_id] = index
        return index

    def _allowed(self, seq: SequenceView) -> range:
        """Positions at which a continuation may begin."""
        first = seq.prompt_length if self._spec.source == "output" else 0
        last = seq.prompt_length if self._spec.source == "prompt" else len(seq.tokens)
        return range(first, last)

    def confidence(self, seq_id: int) -> int:
        """Tokens that the last draft's best match had, 0 for none (the controller asks)."""
        return self._matched.get(seq_id, 0)

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._indices.pop(seq_id, None)
        self._matched.pop(seq_id, None)


def _continuation(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """``length`` tokens from ``start``; past the end they repeat: a loop stays a loop."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(length)]
