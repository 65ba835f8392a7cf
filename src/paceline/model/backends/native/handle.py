"""A model or head that the library has open: forwards (forward.cpp), whole drafts (grow.cpp).

``grow`` makes what draft/trees/grow.py makes, up to ties and the last bits of scores. A chain may
end earlier, behind a token whose path is too unlikely for another forward.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.batch import Batch
from paceline.core.draws import GREEDY_SHARPNESS
from paceline.core.noise import splitmix64
from paceline.core.tree import Draw, TokenTree
from paceline.kernels.library import CBatch, CGrowth, CSpan, CTree, check, library, pointer
from paceline.model.backends.base import GrownTree, WantedTree
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.native.adapters import NativeAdapters
from paceline.model.backends.native.packing import Packing
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.int8 import INT8

_SPANS = ctypes.POINTER(CSpan)
_ALL = 1 << 30  # more than any vocabulary has
Kinds = Sequence[str | None]  # types of layers, as the rotary module has them
Spans = Sequence[tuple[int, int]]  # rows, and keys that they read


_NONE = torch.empty(0, dtype=torch.int64)


class Ropes:
    """Cosines and sines of all positions so far, float32 ``[positions, head_dim]`` for each kind of
    layers: half of a row cosines, half sines. The model's own module computes them."""

    def __init__(self, rotary_emb: Any, kinds: Kinds) -> None:
        self._module, self._kinds = rotary_emb, kinds
        self._length, self._pointers = 0, None
        self._growing = threading.Lock()

    def reach(self, length: int) -> Any:
        """A C array of pointers to tables of at least so many positions, which live as long."""
        with self._growing:  # several engines may decode with one model
            if length > self._length:
                longest = max(256, 1 << (length - 1).bit_length())
                tables = [self._table(longest, kind) for kind in self._kinds]
                pointers: Any = (ctypes.c_void_p * len(tables))(*map(pointer, tables))
                pointers.tables = tables
                self._length, self._pointers = longest, pointers
            return self._pointers

    def _table(self, length: int, kind: str | None) -> torch.Tensor:
        more = () if kind is None else (kind,)
        cos, sin = self._module(torch.zeros(1), torch.arange(length)[None], *more)
        half = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float().contiguous()


def rows_of_logits(batch: Batch) -> int:
    return len(batch.input_ids if batch.logit_rows is None else batch.logit_rows)


class ModelHandle:
    """A model in the library, closed with its last reference. ``packing`` keeps alive what
    ``model`` points to. ``skipped`` of the calls: flags of the layers, if some are left out."""

    def __init__(
        self,
        model: Any,
        packing: Packing,
        rotary_emb: Any,
        rope_kinds: Kinds = (None,),
        adapters: NativeAdapters | None = None,
    ) -> None:
        self._close = library().pl_close
        self._handle = library().pl_open(model)
        check(not self._handle, "the native model")
        self._packing, self._adapters = packing, adapters
        self._layers, self._width = model.layers, model.heads * model.head_dim
        self._ropes = Ropes(rotary_emb, rope_kinds)
        self._caches: WeakKeyDictionary[PagedCache, Any] = WeakKeyDictionary()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._close(self._handle)

    def forward(
        self, name: str, batch: Batch, cache: PagedCache, skipped: Any = None, **fields: Any
    ) -> None:
        """One forward. ``fields``: more of CBatch; the caller keeps alive what they point to."""
        struct, _alive = self._struct(batch, cache, skipped, **fields)
        with traced(name):
            check(library().pl_forward(self._handle, struct))
        count_work(lambda: [self._work(_spans_of(batch), cache, rows_of_logits(batch), skipped)])

    def grow(
        self,
        name: str,
        skipped: Any,
        cache: PagedCache,
        wanted: Sequence[WantedTree],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """As Growth."""
        trees, tables = self._trees_of(wanted, cache.block_size)
        most = max(tree.nodes for tree in wanted)
        nodes = torch.empty(3, len(wanted), most, dtype=torch.int32)  # tokens, parents, slots
        scores = torch.empty(len(wanted), most)
        q = None
        if any(tree.drawn is not None for tree in wanted):
            q = _room_for_q(len(wanted), most, logits, ids)
        counts = array("i", bytes(4 * len(wanted)))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        outputs = None if outputs is None else outputs.contiguous()
        forward, _alive = None, None
        if first is not None:
            assert logits.is_contiguous() and rows_of_logits(first) == len(wanted)
            output = {"logits": logits.data_ptr(), "columns": logits.shape[1]}
            forward, _alive = self._struct(first, cache, skipped, **output)
        ropes = self._ropes.reach(max(tree.base + tree.depth for tree in wanted))
        growth = CGrowth(
            **self._fields(cache),
            trees=len(wanted),
            threads=torch.get_num_threads(),
            tree=trees,
            tables=tables.buffer_info()[0],
            first=None if forward is None else ctypes.pointer(forward),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            columns=logits.shape[1],
            ids=pointer(ids),
            outputs=pointer(outputs),
            skipped=_address(skipped),
            rope=_address(ropes),
            most=most,
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
        read = partial(_forwards, first, wanted, counts, logits.shape[1])
        count_work(lambda: (self._work(spans, cache, rows, skipped) for spans, rows in read()))
        return _read_trees(wanted, nodes, scores, q, counts)

    def _trees_of(self, wanted: Sequence[WantedTree], size: int) -> tuple[Any, array[int]]:
        """An array of CTree, and the trees' block tables in one array. Raises IndexError."""
        tables, trees = array("i"), (CTree * len(wanted))()
        for i, tree in enumerate(wanted):
            if tree.base + tree.width * (tree.depth - 1) > len(tree.table) * size:
                raise IndexError("a tree has no room in the cache")
            params, greedy = tree.params, tree.params.greedy
            # A softmax is one-hot beyond 1e6.
            sharpness = GREEDY_SHARPNESS if greedy else min(1e6, 1 / params.temperature)
            seeded, (power, stop, least) = params.seed is not None, tree.ending
            trees[i] = CTree(
                *(tree.depth, tree.width, tree.nodes, tree.base, len(tables)),
                sampled=0 if greedy else 2 if seeded else 1 if tree.drawn is None else 3,
                top_k=params.top_k if params.top_k > 0 else _ALL,
                sharpness=sharpness,
                top_p=params.top_p,
                min_p=params.min_p,
                power=power,
                stop=stop,
                least=math.log(least) if least > 0 else -math.inf,
                position=tree.position,
                seed=splitmix64(params.seed or tree.drawn or 0),
                pair=tree.adapter and self._adapters and self._adapters.of(tree.adapter),
            )
            tables.extend(tree.table)
        return trees, tables

    def _struct(
        self, batch: Batch, cache: PagedCache, skipped: Any, **fields: Any
    ) -> tuple[Any, Any]:
        """A batch as the library reads it, and what it points to."""
        span_fields: list[int] = []
        tables: list[int] = []
        parents: list[int] = []
        for span, table in zip(batch.spans, batch.tables, strict=True):
            nodes = span.parents
            span_fields += (span.start, span.context, span.pending, len(nodes), span.first_new)
            span_fields += (len(tables), len(parents))
            tables += table
            parents += nodes
        rows, wanted = len(batch.input_ids), batch.logit_rows
        parts = (
            *(span_fields, tables, parents, batch.input_ids, batch.positions, batch.slots),
            wanted or (),
        )
        numbers = array("i", itertools.chain.from_iterable(parts))
        start = numbers.buffer_info()[0]
        starts = [start + 4 * end for end in itertools.accumulate(map(len, parts))]
        ropes = self._ropes.reach(max((span.kv_length for span in batch.spans), default=1))
        runs = None
        if adapted := batch.adapter_runs:
            assert self._adapters is not None, "a head has no adapters"
            runs = self._adapters.runs(adapted)
            fields |= {"runs": len(runs), "run": runs}
        struct = CBatch(
            rows=rows,
            spans=len(batch.spans),
            logit_rows=rows if wanted is None else len(wanted),
            threads=torch.get_num_threads(),
            span=ctypes.cast(start, _SPANS),
            tables=starts[0],
            parents=starts[1],
            ids=starts[2],
            positions=starts[3],
            slots=starts[4],
            wanted=None if wanted is None else starts[5],
            skipped=_address(skipped),
            rope=_address(ropes),
            **self._fields(cache),
            **fields,
        )
        return struct, (numbers, ropes, runs)

    def _fields(self, cache: PagedCache) -> dict[str, Any]:
        """Those of CBatch and CGrowth that say where the layers' keys and values are."""
        known = self._caches.get(cache)
        if known is None:
            array_of = ctypes.c_void_p * self._layers
            layers = [cache.kv(layer) for layer in range(self._layers)]
            assert all(part.is_contiguous() for layer in layers for part in layer)
            keys, values = (array_of(*(layer[n].data_ptr() for layer in layers)) for n in (0, 1))
            fields = {"keys": _address(keys), "values": _address(values)}
            fields |= {"block_size": cache.block_size, "coded": layers[0][0].dtype == INT8}
            known = self._caches[cache] = fields, keys, values
        return known[0]

    def _work(self, spans: Spans, cache: PagedCache, wanted: int, skipped: Any) -> NativeWork:
        """Of a forward with ``wanted`` rows of logits, with rows spread evenly over experts."""
        layers = self._layers - sum(skipped or ())
        products = self._packing.reads(sum(rows for rows, _ in spans), wanted, skipped)
        keys = cache.kv(0)[0]
        entry = keys.shape[-2] * keys.shape[-1] * keys.dtype.itemsize
        read = sum(length for _, length in spans)
        pairs = sum(rows * length for rows, length in spans)
        return NativeWork(products, 2 * layers * entry * read, 4 * layers * self._width * pairs)


def _spans_of(batch: Batch) -> Spans:
    return [(span.rows, span.kv_length) for span in batch.spans]


def _address(struct: Any) -> int | None:
    return None if struct is None else ctypes.addressof(struct)


def _room_for_q(
    trees: int, most: int, logits: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor:
    """[trees, most, tokens] for distributions over the columns' tokens; others are never drawn."""
    if ids is None:
        return torch.empty(trees, most, logits.shape[1])
    return torch.zeros(trees, most, int(ids[-1]) + 1)


def _read_trees(
    wanted: Sequence[WantedTree],
    nodes: torch.Tensor,
    scores: torch.Tensor,
    q: torch.Tensor | None,
    counts: Sequence[int],
) -> list[GrownTree]:
    """``nodes``: tokens, parents and slots of every tree [3, trees, most]; ``q``: the distributions
    of the drawn ones [trees, most, width]."""
    (tokens, parents, slots), logs = nodes.tolist(), scores.tolist()
    trees = []
    for i, n in enumerate(counts):
        known, drawn = tuple(tokens[i][:n]), None
        if q is not None and wanted[i].drawn is not None:
            drawn = q[i, :n]
        draw = Draw.POINT if drawn is None else Draw.IID
        tree = TokenTree(_int64(known), tuple(parents[i][:n]), draw, drawn, known=known)
        trees.append(GrownTree(tree, tuple(slots[i][:n]), tuple(logs[i][:n])))
    return trees


def _forwards(
    first: Batch | None, wanted: Sequence[WantedTree], counts: Sequence[int], columns: int
) -> Iterator[tuple[Spans, int]]:
    """The forwards of a growth, for counting; chains grew as many levels as they have nodes."""
    if first is not None:
        yield _spans_of(first), len(wanted)
    depths = [c if t.width == 1 else t.depth for t, c in zip(wanted, counts, strict=True)]
    for level in range(1, max(depths)):
        trees = [tree for tree, depth in zip(wanted, depths, strict=True) if depth > level]
        widths = [min(tree.width, columns) for tree in trees]
        spans = [(w, tree.base + level * w) for w, tree in zip(widths, trees, strict=True)]
        yield spans, sum(widths)


def _int64(numbers: Sequence[int]) -> torch.Tensor:
    """[n], without a call of torch that copies: behind a forward such a call takes 100 us."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers else _NONE
