"""Indexes of texts for lookups, and the drafts that lookups give.

``open_index`` makes one in the kernels' library if that can be loaded. ``TextIndex`` searches all
texts instead; of n-grams it finds the same.

A request may bring drafts with it. Where its grammar leaves one text (keys, quotes and brackets of
a schema), that is the draft (jump-forward decoding, Zheng et al. 2023, arXiv 2312.07104). OpenAI's
``prediction`` (2024), for edited files, is a text in the request's index; the draft continues it
wherever the answer rejoins it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, takewhile
from operator import itemgetter

import numpy as np

from paceline.core.batch import Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import (
    ANY_FORCED,
    Drafter,
    Guess,
    LookupDrafter,
    Offer,
    States,
    can_extend_forced,
    forced_tokens,
    with_forced_prefix,
)
from paceline.draft.trees.shape import merge
from paceline.kernels.lookup import Draft, Ids, Lookup, NativeTextIndex, functions

_END = -1  # after every finished text
# The next two are also in csrc/lookup.cpp.
_OCCURRENCES = 4  # latest ones of an n-gram: on our prompts more gained nothing
BRANCH = 2  # nodes of an n-gram's candidates after the first
TAKEN_IN = 1024  # tokens of all texts that are indexed in a step: a millisecond or two
_ASIDE = 64  # new tokens that are indexed with a lookup


class TextIndex:
    """Several texts: the newest may still grow, the oldest may be dropped. A lookup scans all
    texts: 20 microseconds, and 1 for each 1,000 tokens."""

    def __init__(self, rule: Lookup) -> None:
        self.rule = rule
        self._stream = array("i")  # all texts, each followed by _END when it is finished
        self._lengths: deque[int] = deque()  # of the finished texts, oldest first
        self.open_tokens = 0  # of the text that still grows

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(self._lengths) + self.open_tokens

    # -- growing and shrinking ---------------------------------------------------------------

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the newest text."""
        self._stream.extend(tokens)
        self.open_tokens += len(tokens)

    def finish(self) -> None:
        """End the newest text; later tokens begin another one."""
        if self.open_tokens:
            self._stream.append(_END)
            self._lengths.append(self.open_tokens)
            self.open_tokens = 0

    def drop_oldest(self) -> None:
        """Forget the oldest finished text, which must exist."""
        del self._stream[: self._lengths.popleft() + 1]

    def texts(self) -> Iterator[Sequence[int]]:
        """The finished texts, oldest first."""
        start = 0
        for length in self._lengths:
            yield self._stream[start : start + length]
            start += length + 1

    # -- looking up ---------------------------------------------------------------------------

    def ngrams(self, fresh: Ids, end: Ids, levels: int, nodes: int) -> Draft:
        """How the newest text went on after earlier occurrences of its last tokens, longest match
        first, then latest: chains of ``levels`` tokens that share beginnings, at most ``nodes``
        nodes, two of each but the first. ``fresh`` tokens are appended before. ``end``: the text's
        last ``depth`` tokens where the index lacks some of the text, else empty."""
        self.extend(fresh)
        text, match, positions = end or self._end(), 0, list[int]()
        for length in reversed(self.rule.lengths):
            ends = self._latest(text, length, _OCCURRENCES)
            match = match or (length if ends else 0)
            positions += [match_end for match_end in ends if match_end not in positions]
        chains = [self._going_on(match_end, levels) for match_end in positions]
        return *merge(chains, nodes, BRANCH), match

    def suffixes(
        self, fresh: Ids, end: Ids, levels: int, nodes: int, memory: TextIndex | None = None
    ) -> Draft:
        """The likeliest continuations of the newest text's longest suffix, in its own texts or in
        ``memory``, whichever expects more accepted tokens. Best first by the product of shares
        along the path; at most ``levels`` levels, ``nodes`` and ``factor * match + offset`` nodes,
        none less likely than ``min_prob``. ``fresh`` and ``end`` as in ``ngrams``. A search of all
        texts has no time for shares: here it is what ``ngrams`` finds for the longer match."""
        draft = self.ngrams(fresh, end, levels, nodes)
        if memory is None:
            return draft
        remembered = memory.ngrams((), end or self._end(), levels, nodes)
        return max(draft, remembered, key=itemgetter(2))

    def _going_on(self, start: int, levels: int) -> list[int]:
        """The tokens of a text from a position on; past the end of the newest they repeat."""
        behind = takewhile(lambda token: token != _END, cycle(self._stream[start : start + levels]))
        return list(islice(behind, levels))

    def _end(self) -> Sequence[int]:
        return self._stream[len(self._stream) - min(self.open_tokens, self.rule.depth) :]

    def _latest(self, text: Sequence[int], length: int, most: int) -> list[int]:
        """Positions after the last occurrences of the text's last tokens, latest first, where the
        text goes on."""
        if len(text) < length or len(self._stream) <= length:
            return []
        stream = np.frombuffer(self._stream, np.int32)
        ends = np.flatnonzero(stream[length - 1 : -1] == text[-1]) + length
        for back in range(2, length + 1):
            ends = ends[stream[ends - back] == text[-back]]
        ends = ends[(stream[ends] != _END) & (ends >= self.rule.first)]
        latest: list[int] = ends[ends < self.rule.stop][::-1][:most].tolist()
        return latest


def open_index(rule: Lookup) -> TextIndex:
    """An empty index, in the kernels' library if that can be loaded."""
    native = functions()
    # Both have the same methods, and kinds are not mixed.
    return TextIndex(rule) if native is None else NativeTextIndex(native, rule)  # type: ignore[return-value]


class IndexedDrafter(LookupDrafter):
    """A lookup drafter with an index for each text. Long prompts are indexed in parts while they
    are prefilled, the rest beside the first lookups."""

    takes_forced = ANY_FORCED
    states: States[TextIndex]

    def take_in(self, slices: Sequence[Slice]) -> None:
        """A step's share of the texts for which drafts are wanted now or after their prefill; those
        that lack least first, so no text holds up another."""
        lacking: list[tuple[int, TextIndex, Sequence[int]]] = []
        for item in slices:
            seq = item.seq
            if item.draft_length if item.decodes else seq.params.may_draft:
                index = self.states.of(seq, self.begin)
                lacking.append((len(seq.tokens) - index.open_tokens, index, seq.tokens))
        left = TAKEN_IN
        for missing, index, tokens in sorted(lacking, key=itemgetter(0)):
            if missing > _ASIDE:
                known = index.open_tokens
                part = tokens[known : known + left]
                index.extend(part)
                left -= len(part)

    def guess(self, item: Slice) -> Guess:
        """What is found, behind the text that a grammar forces there."""
        seq, tokens, index = item.seq, item.seq.tokens, self.states.of(item.seq, self.begin)
        forced = forced_tokens(item)
        left, began = item.draft_length - len(forced), index.open_tokens
        if left <= 0:
            return (), ()
        near = len(tokens) - began <= _ASIDE
        fresh, end = tokens[began:] if near else (), list[int]()
        if forced or not near:
            end = [*tokens[-index.rule.depth :], *forced][-index.rule.depth :]
        return with_forced_prefix(forced, *self.continuation(seq, index, fresh, end, left))

    def continuation(
        self, seq: SequenceView, index: TextIndex, fresh: Ids, end: Ids, length: int
    ) -> Draft:
        """A draft of at most ``length`` levels; ``fresh`` and ``end`` as in ``TextIndex``."""
        raise NotImplementedError


# -- what a request brings with it -----------------------------------------------------------------

_CONTEXT = 16  # last tokens of the prompt before it, so that its first token can match
_RULE = Lookup((1, 2, 4, 8, 16), 32, factor=2.0, offset=6.0)


class Predictions(LookupDrafter):
    """Drafts from a request's grammar where that forces tokens, and from
    ``SamplingParams.prediction`` while the answer follows it; else the engine's drafter drafts."""

    name = "prediction"
    states: States[TextIndex]

    def beside(self, drafter: Drafter, plan: Plan) -> list[TokenTree]:
        """One tree per slice: the request's own if there is one, else ``drafter``'s. Forced text
        is left to a drafter that goes on behind it, where that drafts anything."""
        asked = [item for item in plan.slices if self._is_asked(item)]
        if not asked:
            return drafter.propose(plan)
        later = [
            item.seq.seq_id
            for item in asked
            if item.drafter is None
            and not item.seq.params.prediction
            and can_extend_forced(drafter, forced_tokens(item), item)
        ]
        brought = self._proposed([item for item in asked if item.seq.seq_id not in later])
        rest = [
            replace(item, draft_length=0) if item.seq.seq_id in brought else item
            for item in plan.slices
        ]
        trees = drafter.propose(Plan(tuple(rest)))
        pairs = list(zip(plan.slices, trees, strict=True))
        empty = [i for i, tree in pairs if i.seq.seq_id in later and not len(tree)]
        brought |= self._proposed(empty)
        return [brought.get(item.seq.seq_id, tree) for item, tree in pairs]

    def _is_asked(self, item: Slice) -> bool:
        brings = item.seq.params.prediction or item.seq.constraint
        return bool(item.draft_length and brings and item.drafter in (None, self.name))

    def _proposed(self, items: Sequence[Slice]) -> dict[int, TokenTree]:
        """Trees that are not empty, by ``seq_id``."""
        if not items:
            return {}
        pairs = zip(items, self.propose(Plan(tuple(items))), strict=True)
        return {item.seq.seq_id: tree for item, tree in pairs if len(tree)}

    def lookup(self, slices: Sequence[Slice]) -> list[Offer | None]:
        if not any(item.seq.params.prediction or item.seq.constraint for item in slices):
            self._offered = {}
            return [None] * len(slices)
        return super().lookup(slices)

    def guess(self, item: Slice) -> Guess:
        """What is forced, else how the prediction goes on if the end of the text occurs in it."""
        seq, length = item.seq, item.draft_length
        forced = forced_tokens(item)
        if forced:
            return forced, range(-1, len(forced) - 1), _RULE.depth, len(forced)
        if not seq.params.prediction:
            return (), ()
        index = self.states.of(seq, self.begin)
        taken = index.open_tokens - min(_CONTEXT, seq.prompt_length)
        fresh = seq.params.prediction[taken : taken + TAKEN_IN]
        return index.suffixes(fresh, seq.tokens[-_RULE.depth :], length, length)

    def begin(self, seq: SequenceView) -> TextIndex:
        index = open_index(_RULE)
        index.extend(seq.tokens[max(0, seq.prompt_length - _CONTEXT) : seq.prompt_length])
        return index
