"""From a Batch to what the kernels read: the one place that knows both.

Whatever is pointed to is kept by the object that holds the structure.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.batch import Batch
from paceline.model.backends.native.library import CBatch, CSpan
from paceline.model.paged.codes import CODED
from paceline.model.paged.pieces import KeyValueStore

Pointers = tuple[Any, Any, bool]


class CachePointers:
    """Where the keys and the values of each layer lie in caches, and whether those are codes of 8
    bits, asked for once each."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._known: WeakKeyDictionary[Any, Pointers] = WeakKeyDictionary()

    def of(self, cache: KeyValueStore) -> Pointers:
        found = self._known.get(cache)
        if found is None:
            kind = ctypes.c_void_p * self._num_layers
            layers = [cache.kv(layer) for layer in range(self._num_layers)]
            assert all(part.is_contiguous() for layer in layers for part in layer)
            found = (
                kind(*(k.data_ptr() for k, _ in layers)),
                kind(*(v.data_ptr() for _, v in layers)),
                layers[0][0].dtype == CODED,
            )
            self._known[cache] = found
        return found


def skipped_flags(skipped: frozenset[int], num_layers: int) -> Any:
    """For each layer whether it is left out; None: no layer is."""
    return (
        (ctypes.c_uint8 * num_layers)(*(n in skipped for n in range(num_layers)))
        if skipped
        else None
    )


class BatchArrays:
    """A Batch as int32 arrays and the structure that points to them."""

    def __init__(self, batch: Batch, cache: KeyValueStore, pointers: Pointers) -> None:
        tables, parents = array("i"), array("i")
        spans = (CSpan * len(batch.spans))()
        self.longest = 1  # positions that occur
        for i, (span, table) in enumerate(zip(batch.spans, batch.tables, strict=True)):
            nodes = len(span.parents)
            spans[i] = CSpan(
                span.start,
                span.context,
                span.pending,
                nodes,
                span.first_new,
                len(tables),
                len(parents),
            )
            tables.extend(table)
            parents.extend(span.parents)
            self.longest = max(self.longest, span.kv_length)
        rows = batch.input_ids.shape[0]
        wanted = torch.arange(rows) if batch.logit_rows is None else batch.logit_rows
        fields = [batch.input_ids, batch.positions, batch.slots, wanted]
        ints = [field.to(torch.int32).contiguous() for field in fields]
        self._held: list[Any] = [tables, parents, spans, pointers, ints]
        self.struct = CBatch(
            rows=rows,
            spans=len(spans),
            logit_rows=wanted.shape[0],
            block_size=cache.block_size,
            threads=torch.get_num_threads(),
            ids=ints[0].data_ptr(),
            positions=ints[1].data_ptr(),
            slots=ints[2].data_ptr(),
            wanted=ints[3].data_ptr(),
            span=ctypes.addressof(spans),
            tables=tables.buffer_info()[0],
            parents=parents.buffer_info()[0],
            keys=ctypes.addressof(pointers[0]),
            values=ctypes.addressof(pointers[1]),
            coded=pointers[2],
        )

    def give(
        self,
        logits: torch.Tensor,
        features: Mapping[int, torch.Tensor],
        skipped: frozenset[int],
        num_layers: int,
    ) -> None:
        """Where results go, and which layers are left out."""
        self.struct.logits = logits.data_ptr()
        layers = (ctypes.c_int32 * len(features))(*features)
        places = (ctypes.c_void_p * len(features))(*(t.data_ptr() for t in features.values()))
        self.struct.features = len(features)
        self.struct.feature_layers = ctypes.addressof(layers)
        self.struct.feature = ctypes.addressof(places)
        flags = skipped_flags(skipped, num_layers)
        self.struct.skipped = None if flags is None else ctypes.addressof(flags)
        self._held += [layers, places, flags]

    def go_on_from(self, hidden: torch.Tensor, fused: bool, outputs: torch.Tensor) -> None:
        """What an EAGLE head reads beside tokens, and where its outputs go."""
        self.struct.hidden, self.struct.fused = hidden.data_ptr(), fused
        self.struct.outputs = outputs.data_ptr()
        self._held += [hidden, outputs]

    def turn(self, ropes: Sequence[torch.Tensor]) -> None:
        """The tables of cosines and sines."""
        places = (ctypes.c_void_p * len(ropes))(*(table.data_ptr() for table in ropes))
        self.struct.rope = ctypes.addressof(places)
        self._held += [places, ropes]
