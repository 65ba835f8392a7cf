"""The target's own laws, from forwards that share nothing with the engine's.

No drafter, no tree, no cache from an earlier step: every text is read from its beginning. The
same laws are computed in two batch shapes, whose difference is what rounding does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.certify.cells import String
from paceline.certify.decoding import Start
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import Sequence as Request
from paceline.model.cache import Feed, PagedCache
from paceline.model.target import CausalModel

_ROWS = 2048  # of one forward
_BLOCK = 16
_BATCH = 32  # texts at least whose last tokens are fed together, as in a decoding step


class Scorer:
    """Laws of the token after a start and a string of tokens, for one request's parameters."""

    def __init__(self, model: CausalModel, start: Start, params: SamplingParams) -> None:
        self._model, self._start, self._params = model, start, params

    def at_once(self, strings: Sequence[String]) -> torch.Tensor:
        """float32 [n, vocab] on the host: each text whole in one forward."""
        return self._laws(strings, stepwise=False)

    def stepwise(self, strings: Sequence[String]) -> torch.Tensor:
        """The same laws, the last tokens of a batch of texts in a later forward: as in decoding.

        Too few texts are repeated, for it is the number of rows that rounding depends on.
        """
        copies = -(-_BATCH // max(1, len(strings)))
        return self._laws(list(strings) * copies, stepwise=True)[: len(strings)]

    @torch.inference_mode()
    def logits(self, strings: Sequence[String], stepwise: bool = False) -> torch.Tensor:
        """float32 [n, vocab] on the host, before any of the request's processing."""
        texts = [[*self._start.tokens, *string] for string in strings]
        return torch.cat([self._forward(part, stepwise).float().cpu() for part in _parts(texts)])

    def _laws(self, strings: Sequence[String], stepwise: bool) -> torch.Tensor:
        start, params = self._start, self._params
        seqs = tuple(
            Request(0, [*start.tokens, *string], len(start.prompt), params) for string in strings
        )
        return probabilities(self.logits(strings, stepwise), Rows(seqs, (0,) * len(seqs)))

    def _forward(self, texts: Sequence[list[int]], stepwise: bool) -> torch.Tensor:
        model = self._model
        blocks = sum(-(-len(text) // _BLOCK) for text in texts)
        cache = PagedCache(
            model.cache_shapes, blocks, _BLOCK, model.dtype, model.device, share=False
        )
        for number, text in enumerate(texts):
            cache.admit(number, text)
            cache.reserve(number, len(text))
        done = [0] * len(texts)
        if stepwise:
            done = [len(text) - 1 for text in texts]
            heads = [Feed(i, 0, text[:-1]) for i, text in enumerate(texts) if len(text) > 1]
            if heads:
                model(cache.pack(heads), cache)
        feeds = [Feed(i, done[i], text[done[i] :]) for i, text in enumerate(texts)]
        return model(cache.pack(feeds), cache).logits


def _parts(texts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Texts that fit into one forward together."""
    part: list[list[int]] = []
    rows = 0
    for text in texts:
        if part and rows + len(text) > _ROWS:
            yield part
            part, rows = [], 0
        part.append(text)
        rows += len(text)
    yield part
