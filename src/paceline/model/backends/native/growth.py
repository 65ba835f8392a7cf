"""Drafts of greedy and of seeded requests, grown to their end in one call: csrc/grow.cpp.

Between the levels of a small draft Python takes longer than the forward. What is grown here is what
draft/trees/grow.py grows, up to ties and the last bits of scores; for sampled requests, without the
tokens that are a millionth as likely as a row's likeliest. A chain may end earlier: behind a token
whose path is too unlikely for another pass.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.batch import Batch, Span
from paceline.core.draws import GREEDY_SHARPNESS
from paceline.core.noise import splitmix64
from paceline.core.tree import chain_parents
from paceline.kernels.library import CGrowth, CTree, check, library
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.growing import GrownTree, WantedTree
from paceline.model.backends.native.adapter import BatchArrays, CachePointers, Opened, Ropes
from paceline.model.paged.segments import KeyValueStore

_ALL = 1 << 30  # more than any vocabulary has


def _tree(wanted: WantedTree, table: int) -> CTree:
    """``table``: the place where its blocks begin."""
    params, greedy = wanted.params, wanted.params.greedy
    # Beyond this a softmax is one-hot anyway.
    sharpness = GREEDY_SHARPNESS if greedy else min(1e6, 1 / params.temperature)
    return CTree(
        *(wanted.depth, wanted.width, wanted.nodes, wanted.base, table),
        sampled=0 if greedy else 1 if params.seed is None else 2,
        top_k=params.top_k if params.top_k > 0 else _ALL,
        sharpness=sharpness,
        top_p=params.top_p,
        min_p=params.min_p,
        least=math.log(wanted.least) if wanted.least > 0 else -math.inf,
        position=wanted.position,
        seed=splitmix64(params.seed or 0),
    )


class _Room:
    """Where the library writes what it grew, up to ``most`` nodes of each tree."""

    def __init__(self, trees: int, most: int) -> None:
        self._nodes = torch.empty(3, trees, most, dtype=torch.int32)  # tokens, parents, slots
        self._scores = torch.empty(trees, most)
        self.counts = torch.zeros(trees, dtype=torch.int32)

    def pointers(self) -> dict[str, int]:
        """The fields of CGrowth."""
        names = ("tokens", "parents", "slots", "scores", "counts")
        arrays = (*self._nodes, self._scores, self.counts)
        addresses = {name: array.data_ptr() for name, array in zip(names, arrays, strict=True)}
        return {"most": self._nodes.shape[2], **addresses}

    def trees(self) -> list[GrownTree]:
        tokens, (_, parents, slots) = self._nodes[0].to(torch.int64), self._nodes.tolist()
        return [
            GrownTree(tokens[i, :n], tuple(above[:n]), tuple(expanded[:n]), tuple(logs[:n]))
            for i, (n, above, expanded, logs) in enumerate(
                zip(self.counts.tolist(), parents, slots, self._scores.tolist(), strict=True)
            )
        ]


class NativeGrowth:
    """Grows trees with an opened model or head.

    ``work`` says what a forward over some spans does, all of whose rows have logits.
    """

    def __init__(
        self,
        opened: Opened,
        ropes: Ropes,
        caches: CachePointers,
        name: str,
        work: Callable[[Sequence[Span], KeyValueStore, int], NativeWork],
        skipped: Any = None,
    ) -> None:
        """``skipped``: a flag for each layer, if some are left out."""
        self._opened, self._ropes, self._caches = opened, ropes, caches
        self._name, self._work, self._skipped = name, work, skipped

    def __call__(
        self,
        cache: KeyValueStore,
        wanted: Sequence[WantedTree],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """As Growth."""
        trees, tables = _as_c(wanted, cache.block_size)
        room = _Room(len(wanted), max(tree.nodes for tree in wanted))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        outputs = None if outputs is None else outputs.contiguous()
        pointers = keys, values, coded = self._caches.of(cache)
        longest, run = max(tree.base + tree.depth for tree in wanted), None
        if first is not None:
            run = BatchArrays(first, cache, pointers)
            longest = max(longest, run.longest)
        ropes = self._ropes.reach(longest)
        skipped = None if self._skipped is None else ctypes.addressof(self._skipped)
        if run is not None:
            assert logits.is_contiguous() and run.struct.logit_rows == len(wanted)
            run.struct.rope, run.struct.skipped = ropes.address, skipped
            run.struct.logits, run.struct.columns = logits.data_ptr(), logits.shape[1]
        growth = CGrowth(
            trees=len(wanted),
            block_size=cache.block_size,
            threads=torch.get_num_threads(),
            tree=ctypes.addressof(trees),
            tables=tables.buffer_info()[0],
            first=None if run is None else ctypes.addressof(run.struct),
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            columns=logits.shape[1],
            ids=None if ids is None else ids.data_ptr(),
            outputs=None if outputs is None else outputs.data_ptr(),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            coded=coded,
            skipped=skipped,
            rope=ropes.address,
            **room.pointers(),
        )
        with traced(self._name):
            check(library().pl_grow(self._opened.handle, growth))
        for spans, rows in _runs(first, wanted, room.counts.tolist(), logits.shape[1]):
            count_work(partial(self._work, spans, cache, rows))
        return room.trees()


def _as_c(wanted: Sequence[WantedTree], block_size: int) -> tuple[Any, array[int]]:
    """An array of trees, and their tables one behind the other. Raises IndexError."""
    tables, trees = array("i"), (CTree * len(wanted))()
    for i, tree in enumerate(wanted):
        if tree.base + tree.width * (tree.depth - 1) > len(tree.table) * block_size:
            raise IndexError("a tree has no room in the cache")
        trees[i] = _tree(tree, len(tables))
        tables.extend(tree.table)
    return trees, tables


def _runs(
    first: Batch | None, wanted: Sequence[WantedTree], counts: Sequence[int], columns: int
) -> Iterator[tuple[Sequence[Span], int]]:
    """The spans of each forward and the rows that it has logits of."""
    if first is not None:
        yield first.spans, len(wanted)
    for spans in _levels(wanted, counts, columns):
        yield spans, sum(span.rows for span in spans)


def _levels(
    wanted: Sequence[WantedTree], counts: Sequence[int], columns: int
) -> Iterator[list[Span]]:
    """The rows of each forward, as far as attention's reads depend on them. Of a chain, as many
    levels were grown as it has nodes, ``counts``."""
    depths = [c if t.width == 1 else t.depth for t, c in zip(wanted, counts, strict=True)]
    for level in range(1, max(depths)):
        spans, start = [], 0
        for tree, depth in zip(wanted, depths, strict=True):
            if depth > level:
                width = min(tree.width, columns)
                nodes = chain_parents(level * width)
                spans.append(Span(-1, start, tree.base, 0, nodes, (level - 1) * width))
                start += width
        yield spans
