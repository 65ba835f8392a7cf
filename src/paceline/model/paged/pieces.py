"""How the spans of a step become calls of attention: the plan that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.transfer import to_device, upload
from paceline.model.paged.masks import FULL, Pattern, long_mask, short_mask

SHORT = 64  # spans of at most this many rows are folded; longer ones are prefill chunks
# Spans with more keys are attended one by one: to read them in place, or to pad nothing, is then
# worth more than to share a call.
ALONE = 1024


class KeyValueStore(Protocol):
    """What attention needs of a paged cache."""

    block_size: int

    def kv(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AttentionPiece:
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
class Pieces:
    items: tuple[AttentionPiece, ...]
    order: Tensor | None  # int64 [T]: where each row stands among the pieces' rows


@dataclass(frozen=True)
class AttentionStep:
    """One forward's spans over one cache. ``patterns[layer]`` says what a layer sees.

    Pieces are laid out when the first layer of a pattern asks for them and serve all others.
    """

    cache: KeyValueStore
    spans: tuple[Span, ...]
    tables: tuple[tuple[int, ...], ...]
    slots: Tensor
    patterns: tuple[Pattern, ...]
    first_slot: int | None  # set when the batch writes consecutive slots
    together: bool  # several short spans in one call
    _pieces: dict[tuple[Pattern, int], Pieces] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: Batch,
        cache: KeyValueStore,
        patterns: tuple[Pattern, ...],
        together: bool = True,
    ) -> AttentionStep:
        first_slot = None
        if len(batch.spans) == 1:
            indices = batch.spans[0].indices
            first_slot = _run_start(batch.tables[0], indices.start, indices.stop, cache.block_size)
        return cls(cache, batch.spans, batch.tables, batch.slots, patterns, first_slot, together)

    def pieces(self, layer: int, group: int, dtype: torch.dtype) -> Pieces:
        """Pieces of a layer whose KV heads serve ``group`` query heads each."""
        pattern = self.patterns[layer]
        found = self._pieces.get((pattern, group))
        if found is None:
            found = _Layout(self, pattern, group, dtype).pieces()
            self._pieces[pattern, group] = found
        return found


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
class _Layout:
    """Builds the pieces of one step for one pattern."""

    step: AttentionStep
    pattern: Pattern
    group: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.step.slots.device

    def pieces(self) -> Pieces:
        items: list[AttentionPiece] = []
        order: list[int] = []
        for members in self._groups():
            if len(members) > 1:
                piece, rows = self._padded(members)
            else:
                span = self.step.spans[members[0]]
                piece, rows = self._single(members[0]), list(_row_range(span))
            items.append(piece)
            order.extend(rows)
        return Pieces(tuple(items), self._inverse(order))

    def _groups(self) -> list[list[int]]:
        """Spans that one call attends: short ones whose numbers of keys are close, as all are
        padded to the longest.

        Also on a CPU, though spans in one run could be read in place: 8 sequences of 300 keys,
        4 heads over 2, 12 layers took 6.7 ms one by one and 4.3 ms padded in bf16, 6.3 and
        4.7 ms in float32 (one row each; with five rows 9.2 and 6.0, 8.1 and 6.3). Not so where
        there are many keys, see ALONE.
        """
        spans = self.step.spans
        if not self.step.together or len(spans) == 1:
            return [[i] for i in range(len(spans))]
        groups = [[i] for i, span in enumerate(spans) if span.rows > SHORT]
        keys = {
            i: span.kv_length - self.pattern.first_key(span)
            for i, span in enumerate(spans)
            if span.rows <= SHORT
        }
        if self.device.type == "cpu":
            groups += [[i] for i, count in keys.items() if count > ALONE]
            keys = {i: count for i, count in keys.items() if count <= ALONE}
        shortest = -1
        for i in sorted(keys, key=keys.__getitem__):
            if shortest < 0 or keys[i] > shortest * 1.5 + 64:
                groups.append([])
                shortest = keys[i]
            groups[-1].append(i)
        return [sorted(group) for group in groups]

    def _inverse(self, order: list[int]) -> Tensor | None:
        """Packed row to row among the pieces; -1 in ``order`` marks padding."""
        if order == list(range(len(order))):
            return None
        inverse = [0] * int(self.step.slots.shape[0])
        for place, row in enumerate(order):
            if row >= 0:
                inverse[row] = place
        return to_device(inverse, self.device)

    def _single(self, i: int) -> AttentionPiece:
        span, table = self.step.spans[i], self.step.tables[i]
        size = self.step.cache.block_size
        first = self.pattern.first_key(span)
        keys = span.kv_length - first
        slot = _run_start(table, first, span.kv_length, size)
        piece = AttentionPiece(span.start, 1, span.rows, keys, slot or 0)
        if slot is None:
            blocks = to_device(table[first // size : -(-span.kv_length // size)], self.device)
            piece = replace(piece, gather=blocks, unit=size, skip=first % size)
        if span.rows == 1 and self._sees_all(span):
            return piece
        if span.rows <= SHORT:
            mask = short_mask(span, self.pattern, keys, self.group, self.dtype, self.device)
            return replace(piece, mask=mask)
        if self.pattern == FULL and span.context == 0 and not span.parents:
            return replace(piece, causal=True, folded=False)
        mask = long_mask(span, self.pattern, keys, self.dtype, self.device)
        return replace(piece, mask=mask, folded=False)

    def _sees_all(self, span: Span) -> bool:
        """Whether a single row sees every key from first_key on."""
        if span.pending == 1:
            return True
        nodes = len(span.parents)
        on_path = span.parents[-1] == nodes - 2 and span.parents == tuple(range(-1, nodes - 1))
        return on_path and (self.pattern == FULL or nodes == 1)

    def _padded(self, members: list[int]) -> tuple[AttentionPiece, list[int]]:
        """Short spans in one call: keys right-aligned, absent rows and keys masked."""
        spans = [self.step.spans[i] for i in members]
        firsts = [self.pattern.first_key(span) for span in spans]
        lengths = [span.kv_length - first for span, first in zip(spans, firsts, strict=True)]
        keys, rows = max(lengths), max(span.rows for span in spans)
        size = self.step.cache.block_size
        gather: list[Tensor] = []
        pick: list[int] = []
        order: list[int] = []
        bias = torch.full((len(spans), self.group, rows, keys), float("-inf"), dtype=self.dtype)
        host = torch.device("cpu")
        plain = True  # every row sees every gathered key
        for place, (i, span) in enumerate(zip(members, spans, strict=True)):
            first, length = firsts[place], lengths[place]
            own = _slots(self.step.tables[i], first, span.kv_length, size)
            gather.extend((own[:1].expand(keys - length), own))
            here, absent = list(_row_range(span)), rows - span.rows
            pick.extend(here + [here[0]] * absent)
            order.extend(here + [-1] * absent)
            bias[place, :, :, keys - length :] = 0
            if not (span.rows == 1 and self._sees_all(span)):
                mask = short_mask(span, self.pattern, length, 1, self.dtype, host)
                bias[place, :, : span.rows, keys - length :] = mask
                plain = False
        plain = plain and min(lengths) == keys
        even = pick == list(range(pick[0], pick[0] + len(pick)))
        folded = bias.view(len(spans), 1, self.group * rows, keys)
        piece = AttentionPiece(
            start=pick[0],
            batch=len(members),
            rows=rows,
            keys=keys,
            gather=upload(torch.cat(gather), self.device),
            pick=None if even else to_device(pick, self.device),
            mask=None if plain else upload(folded, self.device),
        )
        return piece, order


def _row_range(span: Span) -> range:
    return range(span.start, span.start + span.rows)


def _slots(table: Sequence[int], start: int, stop: int, size: int) -> Tensor:
    """int64 on the host: slots of the logical indices ``start .. stop``."""
    first = start // size
    blocks = torch.tensor(table[first : -(-stop // size)], dtype=torch.int64)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    return slots[start - first * size : stop - first * size]
