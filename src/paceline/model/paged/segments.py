"""How the spans of a step become attention calls. Layers with the same ``Pattern`` (full attention,
sliding window or chunks) share a layout, which says which cached keys each row attends to, also in
chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.transfer import Staging
from paceline.core.tree import ancestor_mask, depths_of
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.states import StateStep, StateStore

_MAX_CACHED_ROWS, _MAX_CACHED_COLUMNS = 64, 4096  # larger masks are not cached; 256 KB each


@dataclass(frozen=True)
class Pattern:
    """Which positions before a row a layer attends to: all of them, a window, or the row's chunk.
    ``window`` W: keys with ``q_pos - k_pos < W``. ``chunk`` C: keys with ``k_pos // C == q_pos //
    C`` (Llama 4). At most one of the two is set."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, span: Span) -> int:
        """The smallest cache index that any row of the span attends to."""
        base = span.context + span.pending
        if span.pending:
            lowest = span.context
        else:
            lowest = base - 1 + min(depths_of(span.parents)[span.first_new :])
        if self.window is not None:
            # Below base an index is a position; indices of nodes are not.
            return min(max(0, lowest - self.window + 1), base)
        if self.chunk is not None:
            return min(lowest // self.chunk * self.chunk, base)
        return 0

    def phase(self, span: Span) -> int:
        """The span's offset within its chunk; a mask depends on it and on the span's shape."""
        return (span.context + span.pending) % self.chunk if self.chunk is not None else 0


FULL = Pattern()


def visible(span: Span, pattern: Pattern, columns: int, ancestors: bool = True) -> torch.Tensor:
    """bool ``[rows, columns]`` on the host: which of the span's last ``columns`` keys each row
    attends to. The last column is the last tree node or, without a tree, the last pending token.
    With ``ancestors`` False a node attends to all nodes that the pattern allows, and the caller
    masks the others. Except for chunks a mask does not depend on the length of the context, so
    masks are cached, in a few widths."""
    phase = pattern.phase(span)
    depends_on = span.pending, span.parents, span.first_new, pattern, phase, ancestors
    if span.rows > _MAX_CACHED_ROWS or columns > _MAX_CACHED_COLUMNS:
        return _visible(*depends_on, columns)
    width = max(256, 1 << (columns - 1).bit_length())
    return _cached_visible(*depends_on, width)[:, width - columns :]


def _visible(
    pending: int,
    parents: tuple[int, ...],
    first_new: int,
    pattern: Pattern,
    phase: int,
    ancestors: bool,
    columns: int,
) -> torch.Tensor:
    # Positions are counted from the first index after the pending tokens ("base").
    nodes = len(parents)
    depths = torch.tensor(depths_of(parents), dtype=torch.int64)
    key_index = torch.arange(nodes - columns, nodes)
    key_pos = key_index.clone()
    if nodes:
        key_pos[max(0, columns - nodes) :] = (depths - 1)[max(0, nodes - columns) :]
    row_pos = torch.cat([torch.arange(-pending, 0), depths[first_new:] - 1])
    # Of the committed and pending keys, a row attends to those up to its own.
    mask = (key_index < 0) & (key_index <= row_pos[:, None])
    if nodes:
        on_path = ancestor_mask(parents)[first_new:, max(0, nodes - columns) :]
        mask[pending:, max(0, columns - nodes) :] = on_path if ancestors else True
    if pattern.window is not None:
        mask &= row_pos[:, None] - key_pos < pattern.window
    if pattern.chunk is not None:
        row_chunk = torch.div(row_pos + phase, pattern.chunk, rounding_mode="floor")[:, None]
        mask &= row_chunk == torch.div(key_pos + phase, pattern.chunk, rounding_mode="floor")
    return mask


_cached_visible = lru_cache(maxsize=128)(_visible)


MAX_FOLDED_ROWS = 64  # spans with more rows are prefill chunks, and are not folded
MAX_PADDED_KEYS = 1024  # spans with more keys get a call of their own, without padding


@dataclass
class AttentionSegment:
    """One attention call: ``batch`` spans, padded to ``rows`` query rows and ``keys`` keys each.

    Query rows: ``start .. start + batch * rows`` of the ragged batch, or with padding those listed
    in ``pick``. Keys: the slots ``slot .. slot + keys``, or those listed in ``gather``. ``causal``:
    there are as many rows as keys, and the mask is the lower triangle. ``folded``: the few rows of
    the query heads that share a KV head are one matrix. ``gather``, ``pick`` and ``allowed`` (a
    mask) are indices of staged tensors."""

    staging: Staging
    start: int
    batch: int
    rows: int
    keys: int
    folded: bool
    slot: int | None = None
    gather: int | None = None
    pick: int | None = None
    allowed: int | None = None
    # For trees that only the device knows: index in the segment, bool ``[rows, nodes]``.
    ancestors: list[tuple[int, Tensor]] = field(default_factory=list)
    causal: bool = False
    scratch: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # gathered keys, values
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """The additive mask ``[batch, 1, group * rows, keys]`` for ``group`` query heads per KV
        head, or ``[batch, 1, rows, keys]`` if not folded. None: nothing is masked."""
        if self.allowed is None:
            return None
        if group not in self._masks:
            allowed = self.staging.masks[self.allowed]
            if self.ancestors:
                allowed = allowed.clone()
            for index, nodes in self.ancestors:
                allowed[index, : len(nodes), self.keys - nodes.shape[1] :] &= nodes
            allowed = allowed.repeat(1, group if self.folded else 1, 1)[:, None]
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self._masks[group] = mask.masked_fill_(~allowed, float("-inf"))
        return self._masks[group]


@dataclass(frozen=True)
class DeviceBatch:
    """A batch's numbers on a device: int64 ``[T]``; ``logit_rows`` int64 ``[R]``, None for all."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor | None
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, batch: Batch, staging: Staging) -> DeviceBatch:
        """Copy a batch to the device, in one transfer with everything that is staged."""
        rows = staging.add(torch.tensor((batch.input_ids, batch.positions, batch.slots)))
        wanted = None if batch.logit_rows is None else staging.add(batch.logit_rows)
        staging.send()
        ids, positions, slots = staging.numbers[rows].unbind()
        for first, tokens in batch.nodes:
            ids[first : first + len(tokens)] = tokens
        logit_rows = None if wanted is None else staging.numbers[wanted]
        return cls(ids, positions, slots, logit_rows, batch.spans)


@dataclass(frozen=True)
class AttentionStep:
    """What the layers of one forward need besides hidden states. ``layouts`` are by layer;
    ``states``: those of recurrent layers, and how the batch goes through them; ``features``: the
    layers whose inputs are wanted, filled by the forward."""

    batch: DeviceBatch
    cache: PagedCache
    first_slot: int | None  # set when the batch writes consecutive slots
    layouts: tuple[AttentionLayout, ...]
    states: tuple[StateStore, StateStep] | None
    features: dict[int, Any]

    @classmethod
    def of(
        cls,
        batch: Batch,
        cache: PagedCache,
        patterns: tuple[Pattern, ...],
        device: torch.device | None = None,
    ) -> AttentionStep:
        """``patterns`` are by layer; equal ones must be one object. ``device`` None: the CPU."""
        size, first_slot = cache.block_size, None
        if len(batch.spans) == 1:
            indices = batch.spans[0].indices
            first_slot = _run_start(batch.tables[0], indices.start, indices.stop, size)
        staging = Staging(device or torch.device("cpu"))
        by_pattern: dict[int, AttentionLayout] = {}
        for pattern in patterns:
            if id(pattern) not in by_pattern:
                by_pattern[id(pattern)] = AttentionLayout(batch, size, pattern, staging)
        layouts = tuple([by_pattern[id(pattern)] for pattern in patterns])
        store = cache.states
        states = None if store is None else (store, store.route(batch, size))
        on_device, features = DeviceBatch.of(batch, staging), dict.fromkeys(batch.features)
        return cls(on_device, cache, first_slot, layouts, states, features)


class AttentionLayout:
    """The ``segments`` of one step for layers of one pattern, planned on the host."""

    def __init__(self, batch: Batch, block_size: int, pattern: Pattern, staging: Staging) -> None:
        self._spans, self._tables, self._block_size = batch.spans, batch.tables, block_size
        self._pattern, self._staging = pattern, staging
        self._first_keys = [pattern.first_key(span) for span in batch.spans]
        self._lengths = [
            s.kv_length - first for s, first in zip(batch.spans, self._first_keys, strict=True)
        ]
        self.segments: list[AttentionSegment] = []
        order: list[int] = []
        for members in self._groups():
            order.extend(self._segment(members))
        self._order: int | None = None
        if order != list(range(len(order))):
            # Invert the order: from rows of the segments (-1: padding) to rows of the batch.
            inverse = [0] * sum(span.rows for span in self._spans)
            for index, row in enumerate(order):
                if row >= 0:
                    inverse[row] = index
            self._order = staging.add(inverse)

    @property
    def order(self) -> Tensor | None:
        """int64 ``[T]``: each row's index among the rows of all segments; None: the same order."""
        return None if self._order is None else self._staging.numbers[self._order]

    def _groups(self) -> list[list[int]]:
        """Group the spans that share a call: those with few rows and similar numbers of keys, which
        are padded to the most keys. That pays even on a CPU, which could read consecutive blocks in
        place: 8 sequences of 300 keys (4 heads over 2, 12 layers) take 4.3 ms padded and 6.7 ms one
        by one in bf16, 4.7 and 6.3 ms in float32. With more than MAX_PADDED_KEYS it does not."""
        spans, keys = self._spans, self._lengths
        if len(spans) == 1:
            return [[0]]
        limit = MAX_PADDED_KEYS if self._staging.direct else max(keys)
        short = {
            i for i, span in enumerate(spans) if span.rows <= MAX_FOLDED_ROWS and keys[i] <= limit
        }
        groups = [[i] for i in range(len(spans)) if i not in short]
        shortest = -1
        for i in sorted(short, key=keys.__getitem__):
            if shortest < 0 or keys[i] > shortest * 1.5 + 64:
                groups.append([])
                shortest = keys[i]
            groups[-1].append(i)
        return [sorted(group) for group in groups]

    def _segment(self, members: list[int]) -> list[int]:
        """Add the segment of these spans: keys are right-aligned, padding is masked. The keys of a
        single span are read in place if its blocks are consecutive. Returns the batch's rows in the
        order of the segment, -1 for padding."""
        spans, lengths = [self._spans[i] for i in members], [self._lengths[i] for i in members]
        keys, rows, staging = max(lengths), max(span.rows for span in spans), self._staging
        folded = rows <= MAX_FOLDED_ROWS
        segment = AttentionSegment(staging, spans[0].start, len(members), rows, keys, folded)
        self.segments.append(segment)
        gather: list[Tensor] = []
        pick: list[int] = []
        order: list[int] = []
        mask = torch.zeros(len(spans), rows, keys, dtype=torch.bool)
        unmasked = min(lengths) == keys  # every row attends to every key
        for index, (i, span, length) in enumerate(zip(members, spans, lengths, strict=True)):
            table, first = self._tables[i], self._first_keys[i]
            if len(spans) == 1:
                segment.slot = _run_start(table, first, span.kv_length, self._block_size)
            if segment.slot is None:
                slots = _slots(table, first, span.kv_length, self._block_size)
                gather.extend((slots[:1].expand(keys - length), slots))
            padding = rows - span.rows
            span_rows = list(range(span.start, span.start + span.rows))
            pick.extend(span_rows + [span_rows[0]] * padding)
            order.extend(span_rows + [-1] * padding)
            # A padding row attends to all keys: with none its softmax would be NaN.
            mask[index, :, keys - length :] = True
            if not segment.folded and self._pattern == FULL and not (span.context or span.parents):
                segment.causal = True
            elif not (span.rows == 1 and self._sees_all(span)):
                allowed = visible(span, self._pattern, length, span.ancestors is None)
                mask[index, : span.rows, keys - length :] = allowed
                if span.ancestors is not None:
                    segment.ancestors.append((index, span.ancestors[span.first_new :]))
                unmasked = False
        if gather:
            segment.gather = staging.add(torch.cat(gather))
        if pick != list(range(pick[0], pick[0] + len(pick))):
            segment.pick = staging.add(pick)
        if not unmasked:
            segment.allowed = staging.add_mask(mask)
        return order

    def _sees_all(self, span: Span) -> bool:
        """Whether the only row of a span attends to every key from the first on."""
        if span.pending == 1:
            return True
        nodes = len(span.parents)
        on_path = span.parents[-1] == nodes - 2 and span.parents == tuple(range(-1, nodes - 1))
        return on_path and (self._pattern == FULL or nodes == 1)


def _run_start(table: Sequence[int], start: int, stop: int, size: int) -> int | None:
    """The slot of logical index ``start``, if the blocks of ``start .. stop`` are consecutive."""
    first, last = start // size, (stop - 1) // size
    block = table[first]
    if list(table[first : last + 1]) != list(range(block, block + last - first + 1)):
        return None
    return block * size + start % size


def _slots(table: Sequence[int], start: int, stop: int, size: int) -> Tensor:
    """int64 on the host: the slots of the logical indices ``start .. stop``."""
    first = start // size
    blocks = torch.tensor(table[first : -(-stop // size)], dtype=torch.int64)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    return slots[start - first * size : stop - first * size]
