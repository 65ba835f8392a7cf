"""Indexes of token sequences for lookup drafters, and drafts that come with a request.

``open_index`` makes an index in the kernels' library if that can be loaded, else a ``TextIndex``,
which scans all texts. Both find the same n-grams.

``Predictions`` drafts what a request itself brings. Where its grammar allows one continuation only
(keys, quotes and brackets of a schema), the draft is that one (jump-forward decoding, Zheng et al.
2023, arXiv 2312.07104). OpenAI's ``prediction`` (2024), for edited files, is indexed, and the draft
continues it wherever the answer matches it again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, takewhile
from operator import itemgetter

import numpy as np

from paceline.core.batch import Plan, Slice
from paceline.core.sequence import PerSequence, SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import (
    ANY_FORCED,
    Drafter,
    LookupDraft,
    LookupDrafter,
    Proposal,
    can_extend_forced,
    forced_tokens,
    with_forced_prefix,
)
from paceline.draft.trees.shape import merge
from paceline.kernels.lookup import Draft, Ids, Lookup, NativeTextIndex, functions

_END = -1  # follows every finished text
# csrc/lookup.cpp has the next two constants, too.
_MAX_OCCURRENCES = 4  # the latest occurrences of an n-gram; on our prompts more gained nothing
MAX_BRANCH_NODES = 2  # nodes that each candidate of an n-gram after the first may add
MAX_INDEXED_PER_STEP = 1024  # tokens of all sequences: a millisecond or two
_INDEXED_WITH_LOOKUP = 64  # up to so many new tokens are indexed in the call that looks up


class TextIndex:
    """A queue of texts (token sequences): the newest may still grow, the oldest may be dropped. A
    lookup scans all texts: 20 microseconds, and 1 for each 1,000 tokens."""

    def __init__(self, rule: Lookup) -> None:
        self.rule = rule
        self._stream = array("i")  # all texts; _END follows each finished one
        self._lengths: deque[int] = deque()  # of the finished texts, oldest first
        self.open_tokens = 0  # length of the text that still grows

    def __len__(self) -> int:
        """Number of tokens in all texts."""
        return sum(self._lengths) + self.open_tokens

    # -- growing and shrinking ---------------------------------------------------------------

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the newest text."""
        self._stream.extend(tokens)
        self.open_tokens += len(tokens)

    def finish(self) -> None:
        """End the newest text; tokens appended later begin another one."""
        if self.open_tokens:
            self._stream.append(_END)
            self._lengths.append(self.open_tokens)
            self.open_tokens = 0

    def drop_oldest(self) -> None:
        """Remove the oldest finished text, which must exist."""
        del self._stream[: self._lengths.popleft() + 1]

    def texts(self) -> Iterator[Sequence[int]]:
        """The finished texts, oldest first."""
        start = 0
        for length in self._lengths:
            yield self._stream[start : start + length]
            start += length + 1

    # -- looking up ---------------------------------------------------------------------------

    def ngrams(self, new: Ids, tail: Ids, levels: int, nodes: int) -> Draft:
        """Append ``new`` to the newest text and draft what followed earlier occurrences of its last
        tokens: the longest match first, then the latest. The continuations of ``levels`` tokens
        form a trie of at most ``nodes`` nodes; each but the first adds at most two. ``tail``: the
        text's last ``depth`` tokens if the index lacks some of the text, else empty."""
        self.extend(new)
        text, match, positions = tail or self._tail(), 0, list[int]()
        for length in reversed(self.rule.lengths):
            ends = self._latest_matches(text, length, _MAX_OCCURRENCES)
            match = match or (length if ends else 0)
            positions += [match_end for match_end in ends if match_end not in positions]
        chains = [self._continuation_at(match_end, levels) for match_end in positions]
        return *merge(chains, nodes, MAX_BRANCH_NODES), match

    def suffixes(
        self, new: Ids, tail: Ids, levels: int, nodes: int, memory: TextIndex | None = None
    ) -> Draft:
        """The likeliest continuations of the newest text's longest match, here or in ``memory``,
        whichever expects more accepted tokens. A node's probability is the product of the shares of
        occurrences along its path. The likeliest nodes are taken, at most ``nodes`` and ``factor *
        match + offset``, in at most ``levels`` levels, none below ``min_prob``. ``new`` and
        ``tail`` as in ``ngrams``. A scan of all texts has no time to count shares: this class
        returns what ``ngrams`` finds for the longer match."""
        draft = self.ngrams(new, tail, levels, nodes)
        if memory is None:
            return draft
        from_memory = memory.ngrams((), tail or self._tail(), levels, nodes)
        return max(draft, from_memory, key=itemgetter(2))

    def _continuation_at(self, start: int, levels: int) -> list[int]:
        """``levels`` tokens from a position on; at the end of the newest text they repeat."""
        following = self._stream[start : start + levels]
        return list(islice(takewhile(lambda token: token != _END, cycle(following)), levels))

    def _tail(self) -> Sequence[int]:
        return self._stream[len(self._stream) - min(self.open_tokens, self.rule.depth) :]

    def _latest_matches(self, text: Sequence[int], length: int, most: int) -> list[int]:
        """Positions after the ``most`` latest occurrences of the text's last ``length`` tokens,
        latest first, without occurrences at the end of a text."""
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
    # Both classes have the same methods, and a process uses one of them only.
    return TextIndex(rule) if native is None else NativeTextIndex(native, rule)  # type: ignore[return-value]


class IndexedDrafter(LookupDrafter):
    """A lookup drafter with one index per sequence. Long prompts are indexed in parts: during
    prefill, and what is left then in the first decode steps."""

    max_forced_tokens = ANY_FORCED
    states: PerSequence[TextIndex]

    def begin_step(self, slices: Sequence[Slice]) -> None:
        """Index up to ``MAX_INDEXED_PER_STEP`` tokens of sequences that draft now or may later. The
        fewest missing tokens come first, so that a long prompt does not delay other sequences."""
        behind: list[tuple[int, TextIndex, Sequence[int]]] = []
        for item in slices:
            seq = item.seq
            if item.draft_length if item.decodes else seq.params.may_draft:
                index = self.states.get_or_make(seq, self.new_state)
                behind.append((len(seq.tokens) - index.open_tokens, index, seq.tokens))
        budget = MAX_INDEXED_PER_STEP
        for missing, index, tokens in sorted(behind, key=itemgetter(0)):
            if missing > _INDEXED_WITH_LOOKUP:
                start = index.open_tokens
                part = tokens[start : start + budget]
                index.extend(part)
                budget -= len(part)

    def propose_one(self, item: Slice) -> Proposal:
        """The continuation that the index finds for the text and what a grammar forces after it."""
        seq, tokens = item.seq, item.seq.tokens
        index = self.states.get_or_make(seq, self.new_state)
        forced = forced_tokens(item)
        levels, indexed = item.draft_length - len(forced), index.open_tokens
        if levels <= 0:
            return (), ()
        complete = len(tokens) - indexed <= _INDEXED_WITH_LOOKUP
        new, tail = tokens[indexed:] if complete else (), list[int]()
        if forced or not complete:
            tail = [*tokens[-index.rule.depth :], *forced][-index.rule.depth :]
        return with_forced_prefix(forced, *self.continuation(seq, index, new, tail, levels))

    def continuation(
        self, seq: SequenceView, index: TextIndex, new: Ids, tail: Ids, length: int
    ) -> Draft:
        """A draft of at most ``length`` levels; ``new`` and ``tail`` as in ``TextIndex``."""
        raise NotImplementedError


# -- drafts that come with a request ---------------------------------------------------------------

_CONTEXT = 16  # prompt tokens indexed before the prediction, so that its first token can match
_RULE = Lookup((1, 2, 4, 8, 16), 32, factor=2.0, offset=6.0)


class Predictions(LookupDrafter):
    """Drafts the tokens that a request's grammar forces, and its ``SamplingParams.prediction`` as
    long as the answer follows it. In all other cases the engine's drafter drafts."""

    name = "prediction"
    states: PerSequence[TextIndex]
    drafted: Collection[int] = ()  # sequences whose last draft came from their request

    def propose_with(self, drafter: Drafter, plan: Plan) -> list[TokenTree]:
        """One tree per slice: from the request if that has one, else from ``drafter``. A drafter
        that can extend forced tokens goes first: its draft is longer, unless it is empty."""
        eligible = [item for item in plan.slices if self._may_draft(item)]
        self.drafted = ()
        if not eligible:
            return drafter.propose(plan)
        drafter_first = [
            item.seq.seq_id
            for item in eligible
            if item.drafter is None
            and not item.seq.params.prediction
            and can_extend_forced(drafter, forced_tokens(item), item)
        ]
        others = [item for item in eligible if item.seq.seq_id not in drafter_first]
        from_request = self._drafted(others)
        rest = [
            replace(item, draft_length=0) if item.seq.seq_id in from_request else item
            for item in plan.slices
        ]
        trees = drafter.propose(Plan(tuple(rest)))
        pairs = list(zip(plan.slices, trees, strict=True))
        empty = [i for i, tree in pairs if i.seq.seq_id in drafter_first and not len(tree)]
        from_request |= self._drafted(empty)
        self.drafted = from_request.keys()
        return [from_request.get(item.seq.seq_id, tree) for item, tree in pairs]

    def _may_draft(self, item: Slice) -> bool:
        brings_draft = item.seq.params.prediction or item.seq.constraint
        return bool(item.draft_length and brings_draft and item.drafter in (None, self.name))

    def _drafted(self, items: Sequence[Slice]) -> dict[int, TokenTree]:
        """The trees of these slices that are not empty, by ``seq_id``."""
        if not items:
            return {}
        pairs = zip(items, self.propose(Plan(tuple(items))), strict=True)
        return {item.seq.seq_id: tree for item, tree in pairs if len(tree)}

    def lookup(self, slices: Sequence[Slice]) -> list[LookupDraft | None]:
        if not any(item.seq.params.prediction or item.seq.constraint for item in slices):
            self._offered = {}
            return [None] * len(slices)
        return super().lookup(slices)

    def propose_one(self, item: Slice) -> Proposal:
        """The forced tokens, else the prediction's continuation of the text's last tokens."""
        seq, length = item.seq, item.draft_length
        forced = forced_tokens(item)
        if forced:
            return forced, range(-1, len(forced) - 1), _RULE.depth, len(forced)
        if not seq.params.prediction:
            return (), ()
        index = self.states.get_or_make(seq, self.new_state)
        indexed = index.open_tokens - min(_CONTEXT, seq.prompt_length)
        new = seq.params.prediction[indexed : indexed + MAX_INDEXED_PER_STEP]
        return index.suffixes(new, seq.tokens[-_RULE.depth :], length, length)

    def new_state(self, seq: SequenceView) -> TextIndex:
        index = open_index(_RULE)
        index.extend(seq.tokens[max(0, seq.prompt_length - _CONTEXT) : seq.prompt_length])
        return index
