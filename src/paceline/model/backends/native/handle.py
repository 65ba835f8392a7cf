"""A model or head opened in the kernels' library: forwards (forward.cpp), drafting of whole trees
(grow.cpp).

``grow`` makes the trees that draft/trees/grow.py makes, up to ties and the last bits of scores. A
chain may be shorter: it ends after a token whose path is too unlikely to be worth another forward.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from paceline.core.batch import Batch, Span
from paceline.core.draws import GREEDY_SHARPNESS
from paceline.core.noise import id_hashes, splitmix64
from paceline.core.tree import Draw, TokenTree
from paceline.kernels.library import CBatch, CGrowth, CSpan, CTree, check, library, pointer
from paceline.model.backends.base import GrownTree, TreeRequest
from paceline.model.backends.native.adapters import NativeAdapters
from paceline.model.backends.native.packing import WeightPacker
from paceline.model.backends.native.recognise import Rotation
from paceline.model.backends.native.split import NO_ROPE
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.int8 import INT8

_SPANS = ctypes.POINTER(CSpan)
_NO_TOP_K = 1 << 30  # larger than any vocabulary
_NO_TOKENS = torch.empty(0, dtype=torch.int64)


def traced(name: str) -> AbstractContextManager[Any]:
    """A context that records a kernel call as an operator, if torch's profiler runs."""
    enabled = profiler._is_profiler_enabled
    return record_function(f"paceline_native::{name}") if enabled else nullcontext()


class RopeTables:
    """Tables of cosines and sines, float32 ``[positions, head_dim]``, which grow with the longest
    text: the first half of a row are cosines, the second half sines, 1 and 0 for numbers of a head
    that are not rotated. There is a table for each layer type; with longrope (``short_length``)
    two, that of short and that of long texts. ``covering`` also returns ``query_scale``, float32
    ``[positions]``, or None."""

    def __init__(self, rotation: Rotation, head_dim: int) -> None:
        self._rotation, self._half = rotation, head_dim // 2
        lengths = (False, True) if rotation.short_length else (False,)
        self._kinds = [(kind, long) for kind in rotation.kinds for long in lengths]
        self._length, self._pointers = 0, None
        self._growing = threading.Lock()

    def covering(self, length: int) -> Any:
        """A C array of pointers to tables of ``length`` or more positions, which it keeps alive."""
        with self._growing:  # several engines may decode with one model
            if length > self._length:
                padded = max(256, 1 << (length - 1).bit_length())
                tables = [self._table(padded, *kind) for kind in self._kinds]
                pointers: Any = (ctypes.c_void_p * len(tables))(*map(pointer, tables))
                pointers.tables, pointers.query_scale = tables, None
                if self._rotation.query_scaling is not None:
                    beta, original = self._rotation.query_scaling
                    steps = torch.arange(padded) // original
                    pointers.query_scale = 1 + beta * steps.float().log1p()
                self._length, self._pointers = padded, pointers
            return self._pointers

    def _table(self, length: int, kind: str | None, long: bool = False) -> torch.Tensor:
        cosines, sines = torch.ones(length, self._half), torch.zeros(length, self._half)
        if kind != NO_ROPE:
            layer_type = () if kind is None else (kind,)
            positions = torch.arange(length)
            if short := self._rotation.short_length:  # the module decides by the largest position
                last = torch.full((1,), short)
                positions = torch.cat((positions, last)) if long else positions.clamp(max=last - 1)
            cos, sin = self._rotation.module(torch.zeros(1), positions[None], *layer_type)
            angles = cos.shape[-1] // 2
            cosines[:, :angles], sines[:, :angles] = (
                part[0, :length, :angles] for part in (cos, sin)
            )
        return torch.cat((cosines, sines), -1)


def count_logit_rows(batch: Batch) -> int:
    """The number of rows whose logits a forward of ``batch`` computes."""
    return len(batch.input_ids if batch.logit_rows is None else batch.logit_rows)


class ModelHandle:
    """A CModel opened in the library, and closed with the last reference to this object.
    ``weights`` owns the memory that ``model`` points to. ``skipped`` in the calls: a flag for each
    layer that is left out; None: all layers run."""

    def __init__(
        self,
        model: Any,
        weights: WeightPacker,
        rotation: Rotation,
        adapters: NativeAdapters | None = None,
    ) -> None:
        self._short_length = rotation.short_length
        self._close = library().pl_close
        self._handle = library().pl_open(model)
        check(not self._handle, "the native model")
        self._weights, self._adapters = weights, adapters
        self._layers = model.layers
        self._ropes = RopeTables(rotation, model.head_dim)
        self._caches: WeakKeyDictionary[PagedCache, Any] = WeakKeyDictionary()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._close(self._handle)

    def forward(
        self, name: str, batch: Batch, cache: PagedCache, skipped: Any = None, **fields: Any
    ) -> None:
        """One forward, traced under ``name``. ``fields``: further fields of CBatch; the caller
        keeps alive what they point to."""
        struct, _alive = self._batch_struct(batch, cache, skipped, **fields)
        with traced(name):
            check(library().pl_forward(self._handle, struct))

    def grow(
        self,
        name: str,
        skipped: Any,
        cache: PagedCache,
        wanted: Sequence[TreeRequest],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """Implements ``TreeGrower`` (backends/base.py); the call is traced under ``name``."""
        trees, tables = self._tree_structs(wanted, cache.block_size)
        max_nodes = max(tree.nodes for tree in wanted)
        nodes = torch.empty(3, len(wanted), max_nodes, dtype=torch.int32)  # tokens, parents, slots
        scores = torch.empty(len(wanted), max_nodes)
        q, hashes = _allocate_q(wanted, max_nodes, logits, ids), None
        if any(tree.params.seed is not None for tree in wanted):
            hashes = id_hashes(_count_tokens(logits, ids), logits.device)
        counts = array("i", bytes(4 * len(wanted)))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        outputs = None if outputs is None else outputs.contiguous()
        forward, _alive = None, None
        if first is not None:
            assert logits.is_contiguous() and count_logit_rows(first) == len(wanted)
            output = {"logits": logits.data_ptr(), "columns": logits.shape[1]}
            forward, _alive = self._batch_struct(first, cache, skipped, **output)
        ropes = self._ropes.covering(max(tree.base + tree.depth for tree in wanted))
        growth = CGrowth(
            **self._cache_fields(cache),
            trees=len(wanted),
            threads=torch.get_num_threads(),
            tree=trees,
            tables=tables.buffer_info()[0],
            first=None if forward is None else ctypes.pointer(forward),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            columns=logits.shape[1],
            ids=pointer(ids),
            hashes=pointer(hashes),
            outputs=pointer(outputs),
            skipped=_address(skipped),
            rope=_address(ropes),
            query_scale=pointer(ropes.query_scale),
            max_nodes=max_nodes,
            tokens=nodes[0].data_ptr(),
            parents=nodes[1].data_ptr(),
            slots=nodes[2].data_ptr(),
            counts=counts.buffer_info()[0],
            scores=scores.data_ptr(),
            q=pointer(q),
            q_width=0 if q is None else q.shape[2],
        )
        with traced(name):
            check(library().pl_grow(self._handle, growth))
        return _to_grown_trees(wanted, nodes, scores, q, counts)

    def _tree_structs(
        self, wanted: Sequence[TreeRequest], block_size: int
    ) -> tuple[Any, array[int]]:
        """An array of CTree, and the trees' block tables one after the other in one array. Raises
        IndexError if a block table is too short for its tree."""
        tables, trees = array("i"), (CTree * len(wanted))()
        for i, tree in enumerate(wanted):
            if tree.base + tree.width * (tree.depth - 1) > len(tree.table) * block_size:
                raise IndexError("a tree has no room in the cache")
            params, greedy = tree.params, tree.params.greedy
            # With a factor of 1e6 on the logits the softmax is one-hot.
            inverse_temperature = GREEDY_SHARPNESS if greedy else min(1e6, 1 / params.temperature)
            seeded, (power, stop, least) = params.seed is not None, tree.early_stop
            trees[i] = CTree(
                *(tree.depth, tree.width, tree.nodes, tree.base, len(tables)),
                sampling=0 if greedy else 2 if seeded else 1 if tree.draw_seed is None else 3,
                top_k=params.top_k if params.top_k > 0 else _NO_TOP_K,
                inverse_temperature=inverse_temperature,
                top_p=params.top_p,
                min_p=params.min_p,
                power=power,
                min_level_prob=stop,
                min_node_score=math.log(least) if least > 0 else -math.inf,
                rope=self._is_long(tree.position),
                position=tree.position,
                seed=splitmix64(params.seed or tree.draw_seed or 0),
                pair=tree.adapter and self._adapters and self._adapters.pairs_of(tree.adapter),
            )
            tables.extend(tree.table)
        return trees, tables

    def _rope_of(self, span: Span, positions: Sequence[int]) -> int:
        """Which table of a layer the rows of a span take; without longrope there is only one. The
        cache of a draft model may not have marked a sequence as long yet."""
        if self._short_length is None:
            return 0
        return int(span.long or self._is_long(positions[span.start + span.rows - 1]))

    def _is_long(self, position: int) -> bool:
        """Whether a text that has this position takes the angles of long texts."""
        return self._short_length is not None and position >= self._short_length

    def _batch_struct(
        self, batch: Batch, cache: PagedCache, skipped: Any, **fields: Any
    ) -> tuple[Any, Any]:
        """The CBatch of ``batch``, and the objects that must live as long, as it points to them."""
        span_fields: list[int] = []
        tables: list[int] = []
        parents: list[int] = []
        for span, table in zip(batch.spans, batch.tables, strict=True):
            nodes = span.parents
            span_fields += (span.start, span.context, span.pending, len(nodes), span.first_new)
            span_fields += (len(tables), len(parents), self._rope_of(span, batch.positions))
            tables += table
            parents += nodes
        rows, logit_rows = len(batch.input_ids), batch.logit_rows
        parts = (
            *(span_fields, tables, parents, batch.input_ids, batch.positions, batch.slots),
            logit_rows or (),
        )
        # All arrays lie in one buffer: starts[n] is the address where parts[n + 1] begins.
        numbers = array("i", itertools.chain.from_iterable(parts))
        start = numbers.buffer_info()[0]
        starts = [start + 4 * end for end in itertools.accumulate(map(len, parts))]
        ropes = self._ropes.covering(max((span.kv_length for span in batch.spans), default=1))
        runs = None
        if adapted := batch.adapter_runs:
            assert self._adapters is not None, "a head has no adapters"
            runs = self._adapters.runs(adapted)
            fields |= {"runs": len(runs), "run": runs}
        struct = CBatch(
            rows=rows,
            spans=len(batch.spans),
            logit_rows=rows if logit_rows is None else len(logit_rows),
            threads=torch.get_num_threads(),
            span=ctypes.cast(start, _SPANS),
            tables=starts[0],
            parents=starts[1],
            ids=starts[2],
            positions=starts[3],
            slots=starts[4],
            logit_row_indices=None if logit_rows is None else starts[5],
            skipped=_address(skipped),
            rope=_address(ropes),
            query_scale=pointer(ropes.query_scale),
            **self._cache_fields(cache),
            **fields,
        )
        return struct, (numbers, ropes, runs)

    def _cache_fields(self, cache: PagedCache) -> dict[str, Any]:
        """The fields of CBatch and CGrowth that say where the layers' keys and values are."""
        known = self._caches.get(cache)
        if known is None:
            array_of = ctypes.c_void_p * self._layers
            layers = [cache.kv(layer) for layer in range(self._layers)]
            assert all(part.is_contiguous() for layer in layers for part in layer)
            keys, values = (array_of(*(layer[n].data_ptr() for layer in layers)) for n in (0, 1))
            fields = {"keys": _address(keys), "values": _address(values)}
            fields |= {"block_size": cache.block_size, "int8_cache": layers[0][0].dtype == INT8}
            known = self._caches[cache] = fields, keys, values
        return known[0]


def _address(struct: Any) -> int | None:
    return None if struct is None else ctypes.addressof(struct)


def _count_tokens(logits: torch.Tensor, ids: torch.Tensor | None) -> int:
    """The largest token id that a column of the logits stands for, plus one."""
    return logits.shape[1] if ids is None else int(ids[-1]) + 1


def _allocate_q(
    wanted: Sequence[TreeRequest], max_nodes: int, logits: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor | None:
    """``[trees, max_nodes, tokens]`` for the distributions that drawn chains are drawn from. With
    ``ids`` the kernels write those tokens only: all others have probability 0."""
    if all(tree.draw_seed is None for tree in wanted):
        return None
    allocate = torch.empty if ids is None else torch.zeros
    return allocate(len(wanted), max_nodes, _count_tokens(logits, ids))


def _to_grown_trees(
    wanted: Sequence[TreeRequest],
    nodes: torch.Tensor,
    scores: torch.Tensor,
    q: torch.Tensor | None,
    counts: Sequence[int],
) -> list[GrownTree]:
    """The kernels' results as records: ``nodes [3, trees, max_nodes]`` are tokens, parents and
    slots, ``q [trees, max_nodes, tokens]`` the distributions, ``counts`` the nodes of each tree."""
    (tokens, parents, slots), logs = nodes.tolist(), scores.tolist()
    trees = []
    for i, n in enumerate(counts):
        known, drawn = tuple(tokens[i][:n]), None
        if q is not None and wanted[i].draw_seed is not None:
            drawn = q[i, :n]
        draw = Draw.POINT if drawn is None else Draw.IID
        tree = TokenTree(_int64(known), tuple(parents[i][:n]), draw, drawn, host_copy=known)
        trees.append(GrownTree(tree, tuple(slots[i][:n]), tuple(logs[i][:n])))
    return trees


def _int64(numbers: Sequence[int]) -> torch.Tensor:
    """int64 ``[n]`` over an array, without a copy by torch, which takes 100 us after a forward."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers else _NO_TOKENS
