"""What stays open for a model or a head: the library's own part, and tables of rotations."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from paceline.kernels.library import CModel, library


class RopeTables:
    """Cosines and sines of ``length`` positions, ``[length, head_dim]`` float32 each kind: half
    of a row the ones, half the others. The library reads them by an array at ``address``."""

    def __init__(self, tables: Sequence[torch.Tensor], length: int) -> None:
        self.tables, self.length = tables, length
        self._pointers = (ctypes.c_void_p * len(tables))(*(t.data_ptr() for t in tables))
        self.address = ctypes.addressof(self._pointers)


class Ropes:
    """Tables of all positions so far, from the model's own module, in float32."""

    def __init__(self, rotary_emb: Any, kinds: Sequence[str | None]) -> None:
        self._module, self._kinds = rotary_emb, kinds
        self._known = RopeTables((), 0)
        self._growing = threading.Lock()

    def reach(self, length: int) -> RopeTables:
        """Of at least so many positions."""
        with self._growing:  # several engines may decode with one model
            if length > self._known.length:
                longest = max(256, 1 << (length - 1).bit_length())
                self._known = RopeTables(self._made(longest), longest)
            return self._known

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
