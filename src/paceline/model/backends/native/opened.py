"""What stays open for a model or a head: the library's own part, and tables of rotations."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from paceline.model.backends.native.library import CModel, library


class Ropes:
    """Cosines and sines of all positions so far, ``[positions, head_dim]`` float32 each kind: half
    of a row the ones, half the others. They come from the model's own module, in float32."""

    def __init__(self, rotary_emb: Any, kinds: Sequence[str | None]) -> None:
        self._module, self._kinds = rotary_emb, kinds
        self._tables: list[torch.Tensor] = []
        self._length = 0
        self._growing = threading.Lock()

    def reach(self, length: int) -> list[torch.Tensor]:
        """Tables of at least so many positions."""
        with self._growing:  # several engines may decode with one model
            if length > self._length:
                longest = max(256, 1 << (length - 1).bit_length())
                self._tables, self._length = self._made(longest), longest
            return self._tables

    def _made(self, length: int) -> list[torch.Tensor]:
        tables, like = [], torch.zeros(1)
        for kind in self._kinds:
            more = () if kind is None else (kind,)
            cos, sin = self._module(like, torch.arange(length)[None], *more)
            half = cos.shape[-1] // 2
            both = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
            tables.append(both.float().contiguous())
        return tables


class Opened:
    """The library's own part of a model, given back when the last view of it goes."""

    def __init__(self, model: CModel) -> None:
        self._close = library().pl_close
        self.handle = library().pl_open(model)
        if not self.handle:
            raise MemoryError("no memory for the native model")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._close(self.handle)
