"""How the spans of a step become calls of attention: the plan that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.transfer import Staging
from paceline.model.paged.masks import FULL, Pattern, additive, short_mask, visible

SHORT = 64  # spans of at most this many rows are folded; longer ones are prefill chunks
# Spans with more keys are attended one by one: to read them in place, or to pad nothing, is then
# worth more than to share a call.
ALONE = 1024


class KeyValueStore(Protocol):
    """What attention needs of a paged cache."""

    block_size: int

    def kv(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AttentionSegment:
    """Spans attended by one call: ``batch`` sequences of ``rows`` query rows, ``keys`` keys each.

    The rows are ``start .. start + batch * rows`` of the ragged batch, or those named by
    ``pick`` when padded. Keys are the slots ``slot .. slot + keys``, or those gathered: ``gather``
    counts them in runs of ``unit`` slots, and the first ``skip`` are left out.
    """

    start: int
    batch: int
    rows: int
    keys: int
    slot: int = 0
    gather: Tensor | None = None  # int64
    unit: int = 1
    skip: int = 0
    pick: Tensor | None = None  # int64 [batch * rows]
    causal: bool = False  # rows == keys, lower triangle
    mask: Tensor | None = None  # additive; [group * rows, keys], or [batch, 1, group * rows, keys]
    folded: bool = True
    scratch: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # for what is gathered


@dataclass(frozen=True)
class Segments:
    items: tuple[AttentionSegment, ...]
    order: Tensor | None  # int64 [T]: where each row stands among the segments' rows


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
        """Sent together with all else that has been staged, in one copy."""
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
    """One forward's spans over one cache.

    ``batch`` is the one it was made from, brought to the device in one copy with all that the
    segments need there; what depends on the layers' heads follows when the first of them asks.
    """

    batch: DeviceBatch
    cache: KeyValueStore
    first_slot: int | None  # set when the batch writes consecutive slots
    _layouts: tuple[_Layout, ...]  # by layer

    @property
    def slots(self) -> Tensor:
        return self.batch.slots

    @classmethod
    def of(
        cls,
        batch: Batch,
        cache: KeyValueStore,
        patterns: tuple[Pattern, ...],
        together: bool = True,
        device: torch.device | None = None,
    ) -> AttentionStep:
        """``patterns[layer]`` says what a layer sees. ``together``: several short spans in one
        call. ``device``: None is the host."""
        size, first_slot = cache.block_size, None
        if len(batch.spans) == 1:
            indices = batch.spans[0].indices
            first_slot = _run_start(batch.tables[0], indices.start, indices.stop, size)
        staging = Staging(device or torch.device("cpu"))
        made: dict[int, _Layout] = {}  # a model's equal patterns are one object
        for pattern in patterns:
            if id(pattern) not in made:
                made[id(pattern)] = _Layout(batch, size, pattern, staging, together)
        layouts = tuple([made[id(pattern)] for pattern in patterns])
        return cls(DeviceBatch.of(batch, staging), cache, first_slot, layouts)

    def segments(self, layer: int, group: int, dtype: torch.dtype) -> Segments:
        """Segments of a layer whose KV heads serve ``group`` query heads each."""
        return self._layouts[layer].segments(group, dtype)


def _run_start(table: Sequence[int], start: int, stop: int, size: int) -> int | None:
    """First slot of logical indices ``start .. stop`` if their blocks are consecutive."""
    first, last = start // size, (stop - 1) // size
    block = table[first]
    if last != first and list(table[first : last + 1]) != list(
        range(block, block + last - first + 1)
    ):
        return None
    return block * size + start % size


@dataclass(frozen=True)
class _Unsent:
    """A segment before its tensors have been sent: ``gather``, ``pick`` and ``mask`` are their
    numbers in the staging."""

    segment: AttentionSegment
    gather: int | None = None
    pick: int | None = None
    mask: int | Span | None = None  # a span's mask is built on the host, where it is kept
    seen: tuple[tuple[int, Tensor], ...] = ()  # place in the segment, which nodes its rows see

    def finished(
        self, staging: Staging, pattern: Pattern, group: int, dtype: torch.dtype
    ) -> AttentionSegment:
        if self.gather is None and self.pick is None and self.mask is None:
            return self.segment
        numbers, repeats = staging.numbers, group if self.segment.folded else 1
        mask = None
        if isinstance(self.mask, Span):
            mask = short_mask(self.mask, pattern, self.segment.keys, group, dtype)
        elif self.mask is not None:
            allowed = staging.masks[self.mask]
            for index, nodes in self.seen:
                of_span = allowed if allowed.dim() == 2 else allowed[index]
                of_span[: len(nodes), of_span.shape[1] - nodes.shape[1] :] &= nodes
            mask = additive(allowed, dtype, repeats)
        return replace(
            self.segment,
            gather=None if self.gather is None else numbers[self.gather],
            pick=None if self.pick is None else numbers[self.pick],
            mask=mask,
        )


class _Layout:
    """The segments of one step for one pattern, laid out on the host."""

    def __init__(
        self, batch: Batch, size: int, pattern: Pattern, staging: Staging, together: bool
    ) -> None:
        self._spans, self._tables, self._size = batch.spans, batch.tables, size
        self._ancestors = [span.ancestors for span in batch.spans]
        self._pattern, self._staging, self._together = pattern, staging, together
        self._unsent: list[_Unsent] = []
        self._segments: dict[int, Segments] = {}  # by group
        order: list[int] = []
        for members in self._groups():
            if len(members) > 1:
                order.extend(self._padded(members))
            else:
                order.extend(_row_range(self._spans[members[0]]))
                self._unsent.append(self._single(members[0]))
        self._order = self._inverse(order)

    def segments(self, group: int, dtype: torch.dtype) -> Segments:
        segments = self._segments.get(group)
        if segments is None:
            staging, pattern = self._staging, self._pattern
            items = [part.finished(staging, pattern, group, dtype) for part in self._unsent]
            order = None if self._order is None else staging.numbers[self._order]
            segments = self._segments[group] = Segments(tuple(items), order)
        return segments

    def _groups(self) -> list[list[int]]:
        """Spans that one call attends: short ones whose numbers of keys are close, as all are
        padded to the longest.

        Also on a CPU, though spans in one run could be read in place: 8 sequences of 300 keys,
        4 heads over 2, 12 layers took 6.7 ms one by one and 4.3 ms padded in bf16, 6.3 and
        4.7 ms in float32 (one row each; with five rows 9.2 and 6.0, 8.1 and 6.3). Not so where
        there are many keys, see ALONE.
        """
        spans = self._spans
        if not self._together or len(spans) == 1:
            return [[i] for i in range(len(spans))]
        groups = [[i] for i, span in enumerate(spans) if span.rows > SHORT]
        keys = {
            i: span.kv_length - self._pattern.first_key(span)
            for i, span in enumerate(spans)
            if span.rows <= SHORT
        }
        if self._staging.device.type == "cpu":
            groups += [[i] for i, count in keys.items() if count > ALONE]
            keys = {i: count for i, count in keys.items() if count <= ALONE}
        shortest = -1
        for i in sorted(keys, key=keys.__getitem__):
            if shortest < 0 or keys[i] > shortest * 1.5 + 64:
                groups.append([])
                shortest = keys[i]
            groups[-1].append(i)
        return [sorted(group) for group in groups]

    def _inverse(self, order: list[int]) -> int | None:
        """Packed row to row among the segments; -1 in ``order`` marks padding."""
        if order == list(range(len(order))):
            return None
        inverse = [0] * sum(span.rows for span in self._spans)
        for index, row in enumerate(order):
            if row >= 0:
                inverse[row] = index
        return self._staging.add(inverse)

    def _single(self, i: int) -> _Unsent:
        span, table, size, staging = self._spans[i], self._tables[i], self._size, self._staging
        first = self._pattern.first_key(span)
        keys = span.kv_length - first
        slot, gather = _run_start(table, first, span.kv_length, size), None
        if slot is None:
            gather = staging.add(table[first // size : -(-span.kv_length // size)])
        unit, skip = (size, first % size) if slot is None else (1, 0)
        start, rows, short = span.start, span.rows, span.rows <= SHORT
        ancestors, seen = self._ancestors[i], self._seen(i, 0)
        if short and (rows == 1 and self._sees_all(span)):
            mask: int | Span | None = None
        elif not short and self._pattern == FULL and span.context == 0 and not span.parents:
            segment = AttentionSegment(
                start, 1, rows, keys, slot or 0, unit=unit, skip=skip, causal=True, folded=False
            )
            return _Unsent(segment, gather)
        elif short and staging.direct and ancestors is None:
            mask = span
        else:
            allowed = visible(span, self._pattern, keys, ancestors is None)
            mask = staging.add_mask(allowed if ancestors is None else allowed.clone())
        segment = AttentionSegment(
            start, 1, rows, keys, slot or 0, unit=unit, skip=skip, folded=short
        )
        return _Unsent(segment, gather, mask=mask, seen=seen)

    def _seen(self, i: int, index: int) -> tuple[tuple[int, Tensor], ...]:
        ancestors = self._ancestors[i]
        return () if ancestors is None else ((index, ancestors[self._spans[i].first_new :]),)

    def _sees_all(self, span: Span) -> bool:
        """Whether a single row sees every key from first_key on."""
        if span.pending == 1:
            return True
        nodes = len(span.parents)
        on_path = span.parents[-1] == nodes - 2 and span.parents == tuple(range(-1, nodes - 1))
        return on_path and (self._pattern == FULL or nodes == 1)

    def _padded(self, members: list[int]) -> list[int]:
        """Short spans in one call: keys right-aligned, absent rows and keys masked.

        Returns the rows in the order of the segment, -1 for absent ones.
        """
        spans, staging = [self._spans[i] for i in members], self._staging
        firsts = [self._pattern.first_key(span) for span in spans]
        lengths = [span.kv_length - first for span, first in zip(spans, firsts, strict=True)]
        keys, rows = max(lengths), max(span.rows for span in spans)
        gather: list[Tensor] = []
        pick: list[int] = []
        order: list[int] = []
        seen: list[tuple[int, Tensor]] = []
        mask = torch.zeros(len(spans), rows, keys, dtype=torch.bool)
        plain = min(lengths) == keys  # every row sees every gathered key
        for index, (i, span) in enumerate(zip(members, spans, strict=True)):
            first, length = firsts[index], lengths[index]
            slots = _slots(self._tables[i], first, span.kv_length, self._size)
            gather.extend((slots[:1].expand(keys - length), slots))
            here, absent = list(_row_range(span)), rows - span.rows
            pick.extend(here + [here[0]] * absent)
            order.extend(here + [-1] * absent)
            # An absent row sees something: its softmax must be a number.
            mask[index, :, keys - length :] = True
            if not (span.rows == 1 and self._sees_all(span)):
                known = self._ancestors[i] is None
                allowed = visible(span, self._pattern, length, known)
                mask[index, : span.rows, keys - length :] = allowed
                seen += self._seen(i, index)
                plain = False
        even = pick == list(range(pick[0], pick[0] + len(pick)))
        self._unsent.append(
            _Unsent(
                AttentionSegment(start=pick[0], batch=len(members), rows=rows, keys=keys),
                gather=staging.add(torch.cat(gather)),
                pick=None if even else staging.add(pick),
                mask=None if plain else staging.add_mask(mask),
                seen=tuple(seen),
            )
        )
        return order


def _row_range(span: Span) -> range:
    return range(span.start, span.start + span.rows)


def _slots(table: Sequence[int], start: int, stop: int, size: int) -> Tensor:
    """int64 on the host: slots of the logical indices ``start .. stop``."""
    first = start // size
    blocks = torch.tensor(table[first : -(-stop // size)], dtype=torch.int64)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    return slots[start - first * size : stop - first * size]
