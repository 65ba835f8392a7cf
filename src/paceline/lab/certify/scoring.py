"""The target's own distributions, from forwards that share nothing with the engine's.

No drafter, no tree, no cache of the engine's: every prefix is read from its beginning, by itself.
What thousands of texts begin with is read once in each of two batch shapes; what comes behind it
is computed for each text. The same distributions in both shapes differ by what rounding does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.core.batch import Span
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceView
from paceline.lab.certify.cells import String
from paceline.lab.certify.decoding import Start
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

_ROWS = 512  # of one forward behind the beginning
_TEXTS = 64
_BLOCK = 16
_BATCH = 32  # texts at least whose last tokens are computed together, as in a decoding step
_CROWD = 2048  # rows in which a beginning is read a second time, as where many requests start
_CROWDED = 1  # sequence of the cache that holds that second reading; 0 holds the first
_FIRST = 2  # of the texts' own sequences


class Scorer:
    """Distributions of the token after a start and a string of tokens, for one request's
    parameters."""

    def __init__(self, model: CausalModel, start: Start, params: SamplingParams) -> None:
        self._model, self._start, self._params = model, start, params
        # Whole blocks that all texts have; at least the last token of the start is computed anew.
        self._given = max(0, len(start.tokens) - 1) // _BLOCK * _BLOCK
        self._cache: PagedCache | None = None

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
        switch = self._model.rope_switch
        if switch is not None and self._given <= switch < max(map(len, texts)):
            # Some become so long that the beginning is rotated otherwise: each reads its own.
            self._given, self._cache = 0, None
        parts = _parts(texts, self._given)
        return torch.cat([self._forward(part, stepwise).float().cpu() for part in parts])

    def _distributions(self, strings: Sequence[String], stepwise: bool) -> torch.Tensor:
        start, params = self._start, self._params
        seqs = tuple(
            SequenceView(0, [*start.tokens, *string], len(start.prompt), params)
            for string in strings
        )
        return probabilities(self.logits(strings, stepwise), Rows(seqs, (0,) * len(seqs)))

    def _forward(self, texts: Sequence[list[int]], stepwise: bool) -> torch.Tensor:
        model, given = self._model, self._given
        cache = self._cache_for(texts)
        ids = range(_FIRST, _FIRST + len(texts))
        for number, text in zip(ids, texts, strict=True):
            if given:
                cache.borrow(number, _CROWDED if stepwise else 0, given)
            else:
                cache.admit(number, text)
            cache.reserve(number, len(text))
        try:
            done = [given] * len(texts)
            if stepwise:
                done = [len(text) - 1 for text in texts]
                heads = [
                    Span.of(n, given, text[given:-1])
                    for n, text in zip(ids, texts, strict=True)
                    if len(text) - 1 > given
                ]
                if heads:
                    model(cache.batch_of(heads), cache)
            spans = [Span.of(n, done[i], texts[i][done[i] :]) for i, n in enumerate(ids)]
            return model(cache.batch_of(spans), cache).logits
        finally:
            for number in ids:
                cache.free(number)

    def _cache_for(self, texts: Sequence[list[int]]) -> PagedCache:
        """The cache with the beginning in it, and room for these texts."""
        wanted = sum(-(-len(text) // _BLOCK) - self._given // _BLOCK for text in texts)
        if self._cache is None or self._cache.pool.available < wanted:
            self._cache = self._begun(wanted)
        return self._cache

    def _begun(self, wanted: int) -> PagedCache:
        """The beginning alone in one forward, and once more in the crowd of a full step."""
        model, given = self._model, self._given
        crowd = max(1, min(_BATCH, _CROWD // given)) if given else 0
        blocks = given // _BLOCK
        capacity = max(wanted, (crowd - 1) * blocks, 2 * _TEXTS)
        cache = model.new_cache(2 * blocks + capacity, _BLOCK, share=False)
        tokens = self._start.tokens[:given]
        for group in ((0,), range(_CROWDED, _CROWDED + crowd)) if given else ():
            for number in group:
                cache.admit(number, tokens)
                cache.reserve(number, given)
            spans = [Span.of(number, 0, tokens) for number in group]
            model(cache.batch_of(spans), cache)
            for number in group[1:]:
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
