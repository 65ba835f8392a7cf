"""Indexes of texts for lookups, and the drafts that lookups give.

``open_index`` makes one in the kernels' library if that can be loaded. ``TextIndex`` does the same
by searching all texts; the other is tested against it.

A request may bring drafts with it. Where its grammar leaves one text (keys, quotes and brackets of
a schema), that is the draft (jump-forward decoding, Zheng et al. 2023, arXiv 2312.07104). OpenAI's
``prediction`` (2024), for edited files, is a text in the request's index; the draft continues it
wherever the answer rejoins it.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    behind,
    forced_run,
    goes_on_behind,
)
from paceline.draft.trees.shape import merge
from paceline.kernels.lookup import Draft, Ids, Lookup, NativeTextIndex, functions

_END = -1  # after every finished text
# The next three are also in csrc/lookup.cpp.
_OCCURRENCES = 4  # latest ones of an n-gram: on our prompts more gained nothing
BRANCH = 2  # nodes of an n-gram's candidates after the first
_LATEST = 64  # occurrences of a suffix that are compared
TAKEN_IN = 1024  # tokens of all texts that are indexed in a step: 3 ms for n-grams
_ASIDE = 64  # new tokens that are indexed with a lookup
_FOLLOWED = 256  # plans without a lookup after which prompts are no longer indexed


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
        stream = self._stream
        # Past the end of the text they repeat.
        chains = [
            [stream[match_end + step % (len(stream) - match_end)] for step in range(levels)]
            for match_end in positions
        ]
        return *merge(chains, nodes, BRANCH), match

    def suffixes(
        self, fresh: Ids, end: Ids, levels: int, nodes: int, memory: TextIndex | None = None
    ) -> Draft:
        """The likeliest continuations of the newest text's longest suffix, in its own texts or in
        ``memory``, whichever expects more accepted tokens. Best first by the product of shares
        along the path; at most ``levels`` levels, ``nodes`` and ``factor * match + offset`` nodes,
        none less likely than ``min_prob``. ``fresh`` and ``end`` as in ``ngrams``."""
        self.extend(fresh)
        text = list(end or self._end())
        drafts = [
            index._grown(text, levels, nodes) for index in (self, memory) if index is not None
        ]
        return max(drafts, key=lambda ends: ends[0])[1]

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

    def _longest(self, text: Sequence[int]) -> tuple[list[int], int]:
        """The latest occurrences of the longest suffix, and its length. Only occurrences of the
        longest match of the known lengths are compared: older, longer ones can be missed."""
        for length in reversed(self.rule.lengths):
            positions = self._latest(text, length, _LATEST)
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


def open_index(rule: Lookup) -> TextIndex:
    """An empty index, in the kernels' library if that can be loaded."""
    native = functions()
    # Both have the same methods, and kinds are not mixed.
    return TextIndex(rule) if native is None else NativeTextIndex(native, rule)  # type: ignore[return-value]


class IndexedDrafter(LookupDrafter):
    """A lookup drafter with an index for each text. Long prompts are indexed in parts while they
    are prefilled, the rest beside the first lookups."""

    takes_forced = ANY_FORCED
    _unasked = 0  # plans since a draft was wanted
    states: States[TextIndex]

    def take_in(self, slices: Sequence[Slice]) -> None:
        """A step's share of texts for which drafts are wanted now or after their prefill; those
        that lack least first, so no text holds up another."""
        asked = any(item.draft_length and item.decodes for item in slices)
        self._unasked = 0 if asked else self._unasked + 1
        if self._unasked > _FOLLOWED:
            return
        lacking: list[tuple[int, TextIndex, Sequence[int]]] = []
        for item in slices:
            seq = item.seq
            if item.draft_length if item.decodes else seq.params.may_draft:
                index = self.states.of(seq, self.begin)
                missing = len(seq.tokens) - index.open_tokens
                if missing > _ASIDE:
                    lacking.append((missing, index, seq.tokens))
        left = TAKEN_IN
        for _, index, tokens in sorted(lacking, key=itemgetter(0)):
            part = tokens[index.open_tokens : index.open_tokens + left]
            index.extend(part)
            left -= len(part)

    def guess(self, item: Slice) -> Guess:
        """What is found, behind the text that a grammar forces there."""
        seq, tokens, index = item.seq, item.seq.tokens, self.states.of(item.seq, self.begin)
        forced = forced_run(item)
        left, began = item.draft_length - len(forced), index.open_tokens
        if left <= 0:
            return (), ()
        near = len(tokens) - began <= _ASIDE
        fresh, end = tokens[began:] if near else (), list[int]()
        if forced or not near:
            end = [*tokens[-index.rule.depth :], *forced][-index.rule.depth :]
        return behind(forced, *self.continuation(seq, index, fresh, end, left))

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
            and goes_on_behind(drafter, forced_run(item), item)
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
        forced = forced_run(item)
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
