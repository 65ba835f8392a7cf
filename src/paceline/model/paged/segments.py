"""How the spans of a step become calls of attention: one layout for layers of one pattern, which
says which cached keys a row may see (full, sliding-window and chunked layers, chains and trees)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.transfer import Staging
from paceline.core.tree import ancestor_mask, depths_of
from paceline.model.paged.cache import PagedCache

_KEPT_ROWS, _KEPT_COLUMNS = 64, 4096  # masks are kept up to this size, 256 KB each


@dataclass(frozen=True)
class Pattern:
    """What a layer sees of the past, in positions: everything, a window, or its own chunk.
    ``window`` W: keys with ``q_pos - k_pos < W``. ``chunk`` C: keys with ``k_pos // C == q_pos //
    C`` (Llama 4). At most one of them is set."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, span: Span) -> int:
        """The smallest cache index that a row of the span sees."""
        base = span.context + span.pending
        if span.pending:
            lowest = span.context
        else:
            lowest = base - 1 + min(depths_of(span.parents)[span.first_new :])
        if self.window is not None:
            # Node indices are not positions, but every index below base is.
            return min(max(0, lowest - self.window + 1), base)
        if self.chunk is not None:
            return min(lowest // self.chunk * self.chunk, base)
        return 0

    def phase(self, span: Span) -> int:
        """The span's position in its chunk, on which a mask depends beside the span's shape."""
        return (span.context + span.pending) % self.chunk if self.chunk is not None else 0


FULL = Pattern()
# Of a span: pending, parents, first_new; its pattern and phase, and whether ancestors are known.
MaskShape = tuple[int, tuple[int, ...], int, Pattern, int, bool]


def visible(span: Span, pattern: Pattern, columns: int, ancestors: bool = True) -> torch.Tensor:
    """bool ``[rows, columns]`` on the host: which of its last ``columns`` keys each row sees.
    Without ``ancestors`` a node sees all that the pattern allows; the caller masks the rest.
    Columns are right-aligned: the last is the last tree node (or pending token). But for chunks the
    result does not depend on the span's context, so masks are cached in a few widths."""
    shape = span.pending, span.parents, span.first_new, pattern, pattern.phase(span), ancestors
    if span.rows > _KEPT_ROWS or columns > _KEPT_COLUMNS:
        return _visible(shape, columns)
    width = max(256, 1 << (columns - 1).bit_length())
    return _kept(shape, width)[:, width - columns :]


def _visible(shape: MaskShape, columns: int) -> torch.Tensor:
    pending, parents, first_new, pattern, phase, ancestors = shape
    # Positions are counted from the first index after the pending tokens ("base").
    nodes = len(parents)
    depths = torch.tensor(depths_of(parents), dtype=torch.int64)
    key_index = torch.arange(nodes - columns, nodes)
    key_pos = key_index.clone()
    if nodes:
        key_pos[max(0, columns - nodes) :] = (depths - 1)[max(0, nodes - columns) :]
    row_pos = torch.cat([torch.arange(-pending, 0), depths[first_new:] - 1])
    # Committed and pending keys: everything up to the row itself.
    mask = (key_index < 0) & (key_index <= row_pos[:, None])
    if nodes:
        shown = ancestor_mask(parents)[first_new:, max(0, nodes - columns) :]
        mask[pending:, max(0, columns - nodes) :] = shown if ancestors else True
    if pattern.window is not None:
        mask &= row_pos[:, None] - key_pos < pattern.window
    if pattern.chunk is not None:
        same = torch.div(row_pos + phase, pattern.chunk, rounding_mode="floor")[:, None]
        mask &= same == torch.div(key_pos + phase, pattern.chunk, rounding_mode="floor")
    return mask


_kept = lru_cache(maxsize=128)(_visible)


SHORT = 64  # spans of at most this many rows are folded; longer ones are prefill chunks
ALONE = 1024  # spans with more keys are attended one by one, in place and without padding


@dataclass
class AttentionSegment:
    """Spans attended by one call: ``batch`` sequences of ``rows`` query rows and ``keys`` keys.

    Rows: ``start .. start + batch * rows`` of the ragged batch, or those of ``pick`` if padded.
    Keys: the slots ``slot .. slot + keys`` or those of ``gather``. ``causal``: as many rows as
    keys, lower triangle. ``folded``: few rows, which share their KV heads. ``gather``, ``pick``,
    ``allowed`` (a mask): indices in the staging."""

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
    # Of trees that only the device knows: index in the segment, which nodes the rows see.
    ancestors: list[tuple[int, Tensor]] = field(default_factory=list)
    causal: bool = False
    scratch: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # gathered keys, values
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive ``[batch, 1, group * rows, keys]``; not folded, ``[batch, 1, rows, keys]``."""
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
    """A batch's numbers on a device: int64 ``[T]``, and ``[R]`` or None."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor | None
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, batch: Batch, staging: Staging) -> DeviceBatch:
        """Copied together with everything staged."""
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
    """One forward's spans over one cache. ``batch`` is on the device, ``layouts`` are by layer."""

    batch: DeviceBatch
    cache: PagedCache
    first_slot: int | None  # set when the batch writes consecutive slots
    layouts: tuple[AttentionLayout, ...]

    @classmethod
    def of(
        cls,
        batch: Batch,
        cache: PagedCache,
        patterns: tuple[Pattern, ...],
        device: torch.device | None = None,
    ) -> AttentionStep:
        """``patterns[layer]`` says what a layer sees. ``device``: None is the host."""
        size, first_slot = cache.block_size, None
        if len(batch.spans) == 1:
            indices = batch.spans[0].indices
            first_slot = _run_start(batch.tables[0], indices.start, indices.stop, size)
        staging = Staging(device or torch.device("cpu"))
        made: dict[int, AttentionLayout] = {}  # a model's equal patterns are one object
        for pattern in patterns:
            if id(pattern) not in made:
                made[id(pattern)] = AttentionLayout(batch, size, pattern, staging)
        layouts = tuple([made[id(pattern)] for pattern in patterns])
        return cls(DeviceBatch.of(batch, staging), cache, first_slot, layouts)


class AttentionLayout:
    """The ``segments`` of one step for one pattern, laid out on the host."""

    def __init__(self, batch: Batch, size: int, pattern: Pattern, staging: Staging) -> None:
        self._spans, self._tables, self._size = batch.spans, batch.tables, size
        self._pattern, self._staging = pattern, staging
        self._firsts = [pattern.first_key(span) for span in batch.spans]
        self._lengths = [
            s.kv_length - first for s, first in zip(batch.spans, self._firsts, strict=True)
        ]
        self.segments: list[AttentionSegment] = []
        order: list[int] = []
        for members in self._groups():
            order.extend(self._segment(members))
        self._order: int | None = None
        if order != list(range(len(order))):
            # Packed row to row among the segments; -1 marks padding.
            inverse = [0] * sum(span.rows for span in self._spans)
            for index, row in enumerate(order):
                if row >= 0:
                    inverse[row] = index
            self._order = staging.add(inverse)

    @property
    def order(self) -> Tensor | None:
        """int64 ``[T]``: each row's index among the segments' rows; None: the same order."""
        return None if self._order is None else self._staging.numbers[self._order]

    def _groups(self) -> list[list[int]]:
        """Short spans of similar numbers of keys share a call, padded to the longest, also on a
        CPU, which could read runs in place: 8 sequences of 300 keys, 4 heads over 2, 12 layers take
        4.3 ms padded and 6.7 one by one in bf16, 4.7 and 6.3 in float32. Not so with many keys, see
        ALONE."""
        spans, keys = self._spans, self._lengths
        if len(spans) == 1:
            return [[0]]
        most = ALONE if self._staging.direct else max(keys)
        short = {i for i, span in enumerate(spans) if span.rows <= SHORT and keys[i] <= most}
        groups = [[i] for i in range(len(spans)) if i not in short]
        shortest = -1
        for i in sorted(short, key=keys.__getitem__):
            if shortest < 0 or keys[i] > shortest * 1.5 + 64:
                groups.append([])
                shortest = keys[i]
            groups[-1].append(i)
        return [sorted(group) for group in groups]

    def _segment(self, members: list[int]) -> list[int]:
        """Spans in one call: keys right-aligned, absent rows and keys masked. A single span's keys
        are read in place where its blocks lie in one run. Returns the rows in the order of the
        segment, -1 for absent ones."""
        spans, lengths = [self._spans[i] for i in members], [self._lengths[i] for i in members]
        keys, rows, staging = max(lengths), max(span.rows for span in spans), self._staging
        segment = AttentionSegment(staging, spans[0].start, len(members), rows, keys, rows <= SHORT)
        self.segments.append(segment)
        gather: list[Tensor] = []
        pick: list[int] = []
        order: list[int] = []
        mask = torch.zeros(len(spans), rows, keys, dtype=torch.bool)
        plain = min(lengths) == keys  # every row sees every gathered key
        for index, (i, span, length) in enumerate(zip(members, spans, lengths, strict=True)):
            table, first = self._tables[i], self._firsts[i]
            if len(spans) == 1:
                segment.slot = _run_start(table, first, span.kv_length, self._size)
            if segment.slot is None:
                slots = _slots(table, first, span.kv_length, self._size)
                gather.extend((slots[:1].expand(keys - length), slots))
            absent = rows - span.rows
            here = list(range(span.start, span.start + span.rows))
            pick.extend(here + [here[0]] * absent)
            order.extend(here + [-1] * absent)
            # An absent row sees something: its softmax must be a number.
            mask[index, :, keys - length :] = True
            if not segment.folded and self._pattern == FULL and not (span.context or span.parents):
                segment.causal = True
            elif not (span.rows == 1 and self._sees_all(span)):
                allowed = visible(span, self._pattern, length, span.ancestors is None)
                mask[index, : span.rows, keys - length :] = allowed
                if span.ancestors is not None:
                    segment.ancestors.append((index, span.ancestors[span.first_new :]))
                plain = False
        if gather:
            segment.gather = staging.add(torch.cat(gather))
        if pick != list(range(pick[0], pick[0] + len(pick))):
            segment.pick = staging.add(pick)
        if not plain:
            segment.allowed = staging.add_mask(mask)
        return order

    def _sees_all(self, span: Span) -> bool:
        """Whether a single row sees every key from first_key on."""
        if span.pending == 1:
            return True
        nodes = len(span.parents)
        on_path = span.parents[-1] == nodes - 2 and span.parents == tuple(range(-1, nodes - 1))
        return on_path and (self._pattern == FULL or nodes == 1)


def _run_start(table: Sequence[int], start: int, stop: int, size: int) -> int | None:
    """First slot of logical indices ``start .. stop`` if their blocks are consecutive."""
    first, last = start // size, (stop - 1) // size
    block = table[first]
    if list(table[first : last + 1]) != list(range(block, block + last - first + 1)):
        return None
    return block * size + start % size


def _slots(table: Sequence[int], start: int, stop: int, size: int) -> Tensor:
    """int64 on the host: slots of the logical indices ``start .. stop``."""
    first = start // size
    blocks = torch.tensor(table[first : -(-stop // size)], dtype=torch.int64)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    return slots[start - first * size : stop - first * size]
