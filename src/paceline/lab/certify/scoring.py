"""The target's own distributions, from forwards that share nothing with the engine's.

No drafter, no tree, no cache of the engine's: every prefix is read from its beginning, by itself.
What thousands of texts begin with is read once in each of two batch shapes; what comes behind it
is computed for each text. The same distributions in both shapes differ by what rounding does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.core.batch import Span
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceView
from paceline.lab.certify.decoding import Start, String
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

_ROWS = 512  # of one forward behind the beginning
_TEXTS = 64
_BLOCK = 16
_BATCH = 32  # texts at least whose last tokens are computed together, as in a decoding step
_CROWD = 2048  # rows in which a beginning is read stepwise, as where many requests start


class Scorer:
    """Distributions of the token after a start and a string of tokens."""

    def __init__(self, model: CausalModel, start: Start) -> None:
        self._model, self._start = model, start
        self._caches: dict[bool, PagedCache] = {}  # stepwise or not; sequence 0 is the beginning

    def at_once(self, strings: Sequence[String]) -> torch.Tensor:
        """float32 [n, vocab] on the host: all that is not the common beginning in one forward."""
        return self._distributions(strings, stepwise=False)

    def stepwise(self, strings: Sequence[String]) -> torch.Tensor:
        """The same distributions, the last tokens of a batch of texts in a later forward: as in
        decoding.

        Too few texts are repeated, for it is the number of rows that rounding depends on.
        """
        copies = -(-_BATCH // max(1, len(strings)))
        return self._distributions(list(strings) * copies, stepwise=True)[: len(strings)]

    @torch.inference_mode()
    def logits(self, strings: Sequence[String], stepwise: bool = False) -> torch.Tensor:
        """float32 [n, vocab] on the host, before any of the request's processing."""
        texts = [[*self._start.tokens, *string] for string in strings]
        # Whole blocks that all texts share; at least the last token of the start is computed anew.
        switch, shared = self._model.rope_switch, (len(self._start.tokens) - 1) // _BLOCK
        if switch is not None and len(self._start.tokens) <= switch < max(map(len, texts)):
            shared = 0  # some become so long that the beginning is rotated otherwise
        parts = _parts(texts, shared * _BLOCK)
        logits = [self._forward(part, stepwise, shared).float().cpu() for part in parts]
        return torch.cat(logits)

    def _distributions(self, strings: Sequence[String], stepwise: bool) -> torch.Tensor:
        start, length = self._start, len(self._start.prompt)
        texts = [[*start.tokens, *string] for string in strings]
        seqs = tuple(SequenceView(0, text, length, start.params) for text in texts)
        return probabilities(self.logits(strings, stepwise), Rows(seqs, (0,) * len(seqs)))

    def _forward(self, texts: Sequence[list[int]], stepwise: bool, shared: int) -> torch.Tensor:
        cache = self._cache_for(sum(-(-len(text) // _BLOCK) - shared for text in texts), stepwise)
        ids = range(1, 1 + len(texts))
        begins = [cache.admit(number, text) for number, text in zip(ids, texts, strict=True)]
        try:
            for number, text in zip(ids, texts, strict=True):
                cache.reserve(number, len(text))
            for held_back in (1, 0) if stepwise else (0,):
                ends = [len(text) - held_back for text in texts]
                parts = zip(ids, texts, begins, ends, strict=True)
                spans = [Span.of(n, b, text[b:end]) for n, text, b, end in parts if b < end]
                if spans:
                    output = self._model(cache.batch_of(spans), cache)
                begins = ends
            return output.logits
        finally:
            for number in ids:
                cache.free(number)

    def _cache_for(self, wanted: int, stepwise: bool) -> PagedCache:
        """One with so many blocks free, and the beginning in it: read alone, or in a crowd."""
        cache = self._caches.get(stepwise)
        if cache is not None and cache.pool.available >= wanted:
            return cache
        tokens = self._start.tokens
        crowd = range(max(1, min(_BATCH, _CROWD // len(tokens))) if stepwise else 1)
        blocks = -(-len(tokens) // _BLOCK)
        capacity = blocks + max(wanted, 2 * _TEXTS, len(crowd) * blocks)
        cache = self._caches[stepwise] = self._model.new_cache(capacity, _BLOCK)
        for number in crowd:
            cache.admit(number, tokens)
            cache.reserve(number, len(tokens))
        self._model(cache.batch_of([Span.of(number, 0, tokens) for number in crowd]), cache)
        cache.commit(0, tokens, len(tokens))
        for number in crowd[1:]:
            cache.free(number)
        return cache


def _parts(texts: Sequence[list[int]], given: int) -> Iterator[list[list[int]]]:
    """Texts whose tokens behind the ``given`` ones fit into one forward together."""
    part: list[list[int]] = []
    rows = 0
    for text in texts:
        generated = len(text) - given
        if part and (rows + generated > _ROWS or len(part) >= _TEXTS):
            yield part
            part, rows = [], 0
        part.append(text)
        rows += generated
    yield part
