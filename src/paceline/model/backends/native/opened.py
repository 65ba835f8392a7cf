"""A model or a head that the library holds open, and the calls on it: a forward over a batch
(csrc/forward.cpp), and drafts grown to their end (csrc/grow.cpp).

Between the levels of a small draft Python takes longer than the forward. What ``grow`` grows is
what draft/trees/grow.py grows, up to ties and the last bits of scores; for sampled requests,
without the tokens that are a millionth as likely as a row's likeliest. A chain may end earlier:
behind a token whose path is too unlikely for another pass.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.batch import Batch, Span
from paceline.core.draws import GREEDY_SHARPNESS
from paceline.core.noise import splitmix64
from paceline.core.tree import TokenTree, chain_parents
from paceline.kernels.library import CBatch, CGrowth, CModel, CTree, check, library
from paceline.model.backends.base import GrownTree, WantedTree
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.native.packing import Packing
from paceline.model.paged.int8 import INT8
from paceline.model.paged.segments import KeyValueStore

_ALL = 1 << 30  # more than any vocabulary has
Pointers = tuple[Any, Any, bool]


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of ``length`` positions, ``[length, head_dim]`` float32 each kind: half
    of a row the ones, half the others. The library reads them by an array at ``address``."""

    length: int
    tables: Sequence[torch.Tensor] = ()
    _pointers: Any = field(init=False)

    def __post_init__(self) -> None:
        pointers = (ctypes.c_void_p * len(self.tables))(*(t.data_ptr() for t in self.tables))
        object.__setattr__(self, "_pointers", pointers)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pointers)


class Ropes:
    """Tables of all positions so far, from the model's own module, in float32."""

    def __init__(self, rotary_emb: Any, kinds: Sequence[str | None]) -> None:
        self._module, self._kinds = rotary_emb, kinds
        self._known = RopeTables(0)
        self._growing = threading.Lock()

    def reach(self, length: int) -> RopeTables:
        """Of at least so many positions."""
        with self._growing:  # several engines may decode with one model
            if length > self._known.length:
                longest = max(256, 1 << (length - 1).bit_length())
                self._known = RopeTables(longest, [self._table(longest, k) for k in self._kinds])
            return self._known

    def _table(self, length: int, kind: str | None) -> torch.Tensor:
        more = () if kind is None else (kind,)
        cos, sin = self._module(torch.zeros(1), torch.arange(length)[None], *more)
        half = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float().contiguous()


def rows_of_logits(batch: Batch) -> int:
    """How many rows have logits."""
    return len(batch.input_ids if batch.logit_rows is None else batch.logit_rows)


class Opened:
    """The library's own part of a model, given back when the last view of it goes.

    ``packing`` holds what ``model`` points to; ``rotary_emb`` makes the tables of each of
    ``rope_kinds``. ``skipped`` of the calls: a flag for each layer, if some are left out.
    """

    def __init__(
        self,
        model: CModel,
        packing: Packing,
        rotary_emb: Any,
        rope_kinds: Sequence[str | None] = (None,),
    ) -> None:
        self._close = library().pl_close
        self._handle = library().pl_open(model)
        if not self._handle:
            raise MemoryError("no memory for the native model")
        self._packing = packing
        self._layers, self._width = model.layers, model.heads * model.head_dim
        self._ropes = Ropes(rotary_emb, rope_kinds)
        self._caches: WeakKeyDictionary[Any, Pointers] = WeakKeyDictionary()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._close(self._handle)

    def forward(
        self, name: str, batch: Batch, cache: KeyValueStore, skipped: Any = None, **fields: Any
    ) -> None:
        """One forward. ``fields``: more of CBatch; what they point to, the caller holds."""
        pointers = self._pointers(cache)
        struct, longest, _held = _struct_of(batch, cache, pointers, **fields)
        ropes = self._ropes.reach(longest)
        struct.rope = ropes.address
        struct.skipped = None if skipped is None else ctypes.addressof(skipped)
        with traced(name):
            check(library().pl_forward(self._handle, struct))
        count_work(lambda: self._work(batch.spans, cache, rows_of_logits(batch), skipped))

    def grow(
        self,
        name: str,
        skipped: Any,
        cache: KeyValueStore,
        wanted: Sequence[WantedTree],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """As Growth."""
        trees, tables = _trees_of(wanted, cache.block_size)
        most = max(tree.nodes for tree in wanted)
        nodes = torch.empty(3, len(wanted), most, dtype=torch.int32)  # tokens, parents, slots
        scores = torch.empty(len(wanted), most)
        counts = torch.zeros(len(wanted), dtype=torch.int32)
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        outputs = None if outputs is None else outputs.contiguous()
        pointers = self._pointers(cache)
        flags = None if skipped is None else ctypes.addressof(skipped)
        longest, run, held = max(tree.base + tree.depth for tree in wanted), None, None
        if first is not None:
            assert logits.is_contiguous() and rows_of_logits(first) == len(wanted)
            fields = {"logits": logits.data_ptr(), "columns": logits.shape[1], "skipped": flags}
            run, reach, held = _struct_of(first, cache, pointers, **fields)
            longest = max(longest, reach)
        ropes = self._ropes.reach(longest)
        if run is not None:
            run.rope = ropes.address
        growth = CGrowth(
            trees=len(wanted),
            block_size=cache.block_size,
            threads=torch.get_num_threads(),
            tree=ctypes.addressof(trees),
            tables=tables.buffer_info()[0],
            first=None if run is None else ctypes.addressof(run),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            columns=logits.shape[1],
            ids=None if ids is None else ids.data_ptr(),
            outputs=None if outputs is None else outputs.data_ptr(),
            keys=ctypes.addressof(pointers[0]),
            values=ctypes.addressof(pointers[1]),
            int8_cache=pointers[2],
            skipped=flags,
            rope=ropes.address,
            most=most,
            tokens=nodes[0].data_ptr(),
            parents=nodes[1].data_ptr(),
            slots=nodes[2].data_ptr(),
            counts=counts.data_ptr(),
            scores=scores.data_ptr(),
        )
        with traced(name):
            check(library().pl_grow(self._handle, growth))
        del held
        for spans, rows in _forwards(first, wanted, counts.tolist(), logits.shape[1]):
            count_work(lambda s=spans, r=rows: self._work(s, cache, r, skipped))  # type: ignore[misc]
        return _read_trees(nodes, scores, counts.tolist())

    def _pointers(self, cache: KeyValueStore) -> Pointers:
        """Where the keys and the values of each layer lie, and whether those are in 8 bits; asked
        for once of a cache."""
        pointers = self._caches.get(cache)
        if pointers is None:
            array_of = ctypes.c_void_p * self._layers
            layers = [cache.kv(layer) for layer in range(self._layers)]
            assert all(part.is_contiguous() for layer in layers for part in layer)
            pointers = self._caches[cache] = (
                array_of(*(keys.data_ptr() for keys, _ in layers)),
                array_of(*(values.data_ptr() for _, values in layers)),
                layers[0][0].dtype == INT8,
            )
        return pointers

    def _work(
        self, spans: Sequence[Span], cache: KeyValueStore, wanted: int, skipped: Any
    ) -> NativeWork:
        """Of a forward with ``wanted`` rows of logits. Of experts, as if the rows were shared out
        evenly; windows are not looked at."""
        layers = self._layers - sum(skipped or ())
        products = self._packing.reads(sum(span.rows for span in spans), wanted, skipped)
        keys = cache.kv(0)[0]
        entry = keys.shape[-2] * keys.shape[-1] * keys.dtype.itemsize
        read = sum(span.kv_length for span in spans)
        pairs = sum(span.rows * span.kv_length for span in spans)
        return NativeWork(products, 2 * layers * entry * read, 4 * layers * self._width * pairs)


def _struct_of(
    batch: Batch, cache: KeyValueStore, pointers: Pointers, **fields: Any
) -> tuple[CBatch, int, Any]:
    """A batch as the library reads it, how many positions occur, and what it points to."""
    span_fields: list[int] = []
    tables: list[int] = []
    parents: list[int] = []
    longest = 1
    for span, table in zip(batch.spans, batch.tables, strict=True):
        nodes = span.parents
        span_fields += (span.start, span.context, span.pending, len(nodes), span.first_new)
        span_fields += (len(tables), len(parents))
        tables += table
        parents += nodes
        longest = max(longest, span.kv_length)
    rows, wanted = len(batch.input_ids), batch.logit_rows
    parts = (
        *(span_fields, tables, parents, batch.input_ids, batch.positions, batch.slots),
        wanted or (),
    )
    numbers = array("i", itertools.chain.from_iterable(parts))
    ends = list(itertools.accumulate(map(len, parts)))
    start = numbers.buffer_info()[0]
    struct = CBatch(
        rows=rows,
        spans=len(batch.spans),
        logit_rows=rows if wanted is None else len(wanted),
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
        int8_cache=pointers[2],
        **fields,
    )
    return struct, longest, numbers


def _trees_of(wanted: Sequence[WantedTree], block_size: int) -> tuple[Any, array[int]]:
    """An array of CTree, and their tables one behind the other. Raises IndexError."""
    tables, trees = array("i"), (CTree * len(wanted))()
    for i, tree in enumerate(wanted):
        if tree.base + tree.width * (tree.depth - 1) > len(tree.table) * block_size:
            raise IndexError("a tree has no room in the cache")
        params, greedy = tree.params, tree.params.greedy
        # Beyond this a softmax is one-hot anyway.
        sharpness = GREEDY_SHARPNESS if greedy else min(1e6, 1 / params.temperature)
        trees[i] = CTree(
            *(tree.depth, tree.width, tree.nodes, tree.base, len(tables)),
            sampled=0 if greedy else 1 if params.seed is None else 2,
            top_k=params.top_k if params.top_k > 0 else _ALL,
            sharpness=sharpness,
            top_p=params.top_p,
            min_p=params.min_p,
            least=math.log(tree.least) if tree.least > 0 else -math.inf,
            position=tree.position,
            seed=splitmix64(params.seed or 0),
        )
        tables.extend(tree.table)
    return trees, tables


def _read_trees(nodes: torch.Tensor, scores: torch.Tensor, counts: list[int]) -> list[GrownTree]:
    """``nodes``: tokens, parents and slots of every tree [3, trees, most]."""
    tokens, (_, parents, slots), logs = nodes[0].to(torch.int64), nodes.tolist(), scores.tolist()
    trees = []
    for i, n in enumerate(counts):
        tree = TokenTree(tokens[i, :n], tuple(parents[i][:n]))
        trees.append(GrownTree(tree, tuple(slots[i][:n]), tuple(logs[i][:n])))
    return trees


def _forwards(
    first: Batch | None, wanted: Sequence[WantedTree], counts: Sequence[int], columns: int
) -> Iterator[tuple[Sequence[Span], int]]:
    """Of each forward of a growth the spans, as far as attention's reads depend on them, and how
    many rows have logits. Of a chain, as many levels were grown as it has nodes, ``counts``."""
    if first is not None:
        yield first.spans, len(wanted)
    depths = [c if t.width == 1 else t.depth for t, c in zip(wanted, counts, strict=True)]
    for level in range(1, max(depths)):
        spans, start = [], 0
        for tree, depth in zip(wanted, depths, strict=True):
            if depth > level:
                width = min(tree.width, columns)
                nodes = chain_parents(level * width)
                spans.append(Span(-1, start, tree.base, 0, nodes, (level - 1) * width))
                start += width
        yield spans, start
