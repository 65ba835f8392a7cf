"""What the kernels read, as ctypes structures: an opened model, rotary tables, caches, batches.

Whatever is pointed to is kept by the object that holds the structure.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.batch import Batch
from paceline.kernels.library import CBatch, CModel, library
from paceline.model.paged.int8 import INT8
from paceline.model.paged.segments import KeyValueStore

Pointers = tuple[Any, Any, bool]


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


class CachePointers:
    """Where the keys and the values of each layer lie in caches, and whether those are codes of 8
    bits, asked for once each."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._known: WeakKeyDictionary[Any, Pointers] = WeakKeyDictionary()

    def of(self, cache: KeyValueStore) -> Pointers:
        pointers = self._known.get(cache)
        if pointers is None:
            kind = ctypes.c_void_p * self._num_layers
            layers = [cache.kv(layer) for layer in range(self._num_layers)]
            assert all(part.is_contiguous() for layer in layers for part in layer)
            pointers = (
                kind(*(k.data_ptr() for k, _ in layers)),
                kind(*(v.data_ptr() for _, v in layers)),
                layers[0][0].dtype == INT8,
            )
            self._known[cache] = pointers
        return pointers


def skipped_flags(skipped: frozenset[int], num_layers: int) -> Any:
    """For each layer whether it is left out; None: no layer is."""
    return (
        (ctypes.c_uint8 * num_layers)(*(n in skipped for n in range(num_layers)))
        if skipped
        else None
    )


class BatchArrays:
    """A Batch as int32 numbers and the structure that points to them."""

    def __init__(self, batch: Batch, cache: KeyValueStore, pointers: Pointers) -> None:
        fields: list[int] = []
        tables: list[int] = []
        parents: list[int] = []
        self.longest = 1  # positions that occur
        for span, table in zip(batch.spans, batch.tables, strict=True):
            nodes = span.parents
            fields += (span.start, span.context, span.pending, len(nodes), span.first_new)
            fields += (len(tables), len(parents))
            tables += table
            parents += nodes
            self.longest = max(self.longest, span.kv_length)
        self.rows, wanted = len(batch.input_ids), batch.logit_rows
        self.logit_rows = self.rows if wanted is None else len(wanted)
        parts = fields, tables, parents, batch.input_ids, batch.positions, batch.slots, wanted or ()
        numbers = array("i", itertools.chain.from_iterable(parts))
        ends = list(itertools.accumulate(map(len, parts)))
        start = numbers.buffer_info()[0]
        self._held: list[Any] = [numbers, pointers]
        self.struct = CBatch(
            rows=self.rows,
            spans=len(batch.spans),
            logit_rows=self.logit_rows,
            block_size=cache.block_size,
            threads=torch.get_num_threads(),
            span=start,
            tables=start + 4 * ends[0],
            parents=start + 4 * ends[1],
            ids=start + 4 * ends[2],
            positions=start + 4 * ends[3],
            slots=start + 4 * ends[4],
            wanted=None if wanted is None else start + 4 * ends[5],
            keys=ctypes.addressof(pointers[0]),
            values=ctypes.addressof(pointers[1]),
            coded=pointers[2],
        )

    def set_outputs(
        self,
        logits: torch.Tensor | None,
        features: Mapping[int, torch.Tensor],
        skipped: Any = None,
    ) -> None:
        """Where results go, and which layers are left out: see ``skipped_flags``."""
        self.struct.logits = None if logits is None else logits.data_ptr()
        self._held.append(skipped)
        if skipped is not None:
            self.struct.skipped = ctypes.addressof(skipped)
        if features:
            layers = (ctypes.c_int32 * len(features))(*features)
            outputs = (ctypes.c_void_p * len(features))(*(t.data_ptr() for t in features.values()))
            self.struct.features = len(features)
            self.struct.feature_layers = ctypes.addressof(layers)
            self.struct.feature = ctypes.addressof(outputs)
            self._held += [layers, outputs]

    def set_greedy(self) -> Any:
        """An array that will hold the greedy choice of each row of logits."""
        greedy = (ctypes.c_int32 * self.logit_rows)()
        self.struct.greedy = ctypes.addressof(greedy)
        return greedy

    def set_features(self, hidden: torch.Tensor, fused: bool, outputs: torch.Tensor) -> None:
        """What an EAGLE head reads beside tokens, and where its outputs go."""
        self.struct.hidden, self.struct.fused = hidden.data_ptr(), fused
        self.struct.outputs = outputs.data_ptr()
        self._held += [hidden, outputs]

    def set_ropes(self, ropes: RopeTables) -> None:
        """The tables of cosines and sines."""
        self.struct.rope = ropes.address
        self._held.append(ropes)
