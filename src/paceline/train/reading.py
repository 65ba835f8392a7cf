"""Reading texts through the engine's own kernels, several times as fast as through the module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UnsupportedModelError
from paceline.model.paged.cache import Feed, PagedCache
from paceline.model.target import CausalModel

_BLOCK = 16  # tokens of a cache block


class NativeReader:
    """Hidden states of a frozen target, by the kernels that decode with it.

    It holds its own, packed copy of the weights; what it reads is what a head is given in use.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._cache: PagedCache | None = None
        self._tokens = 0

    @classmethod
    def of(cls, target: Any, name: str) -> NativeReader | None:
        """Of a transformers module, which stays as it is; None where the kernels do not run it."""
        try:
            model = CausalModel(copy.deepcopy(target), name).quickened()
        except UnsupportedModelError:  # it can be trained for, if not be decoded with
            return None
        return None if model.native is None else cls(model)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """The inputs of ``layers`` for windows ``ids`` int64 ``[B, W]``, each ``[B, W, hidden]``;
        the number of layers stands for the final norm's output."""
        cache = self._room(ids.numel() + len(ids) * _BLOCK)
        feeds = []
        for number, window in enumerate(ids.tolist()):
            cache.admit(number, [], share=False)
            cache.reserve(number, len(window))
            feeds.append(Feed(number, 0, window, wants_logits=False))
        try:
            found = self._model(cache.batch_of(feeds), cache, sorted(set(layers))).features
        finally:
            for feed in feeds:
                cache.free(feed.seq_id)
        return [found[layer].view(*ids.shape, -1) for layer in layers]

    def _room(self, tokens: int) -> PagedCache:
        if self._cache is None or tokens > self._tokens:
            self._tokens = tokens
            self._cache = self._model.new_cache(-(-tokens // _BLOCK), _BLOCK, share=False)
        return self._cache
