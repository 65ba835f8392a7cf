"""States of recurrent layers beside the paged keys and values: one slot for a state of all layers.

A state belongs to the token that made it, as a key does, so a sequence's states are known by its
logical indices (see cache.py). A forward writes new slots and never one that another row reads:
rejected drafts and undone steps need nothing put back, samples of a prompt share a slot, and a slot
at the end of a full block can be found again by the block's content. In a step::

    pending tokens  a chunk, from the state before it to that after its last token
    a tree's nodes  one row each, from the parent's state; the rows of a level together
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.transfer import to_device
from paceline.core.tree import parents_of
from paceline.model.paged.blocks import BlockPool, OutOfBlocksError

StatePart = tuple[tuple[int, ...], torch.dtype]  # shape without the batch, and dtype
PENDING_SLOTS = 2  # that a step's pending tokens write: behind their last full block, and the last
_STEPPED = 8  # so few pending tokens go row by row: chunks are padded to 64 or 256 tokens


def bytes_per_state(parts: Sequence[Sequence[StatePart]]) -> int:
    """Bytes of one state of all layers."""
    return sum(
        torch.Size(shape).numel() * dtype.itemsize for layer in parts for shape, dtype in layer
    )


@dataclass(frozen=True)
class StateLevel:
    """Rows that step together: their numbers in the batch ``rows [n]`` int64, their ``span`` among
    the rows of all levels, and the slots of the states ``before`` and ``behind`` them, as int64
    ``[n]`` or as a slice of one."""

    rows: Tensor
    span: slice
    before: Tensor | slice
    behind: Tensor | slice


@dataclass(frozen=True)
class StateStep:
    """How a batch's rows go through a recurrent layer: the ``chunks``, in order, as (first row, end
    row, slot before, slot behind), then the ``levels``, whose rows are ``stepped`` together."""

    chunks: tuple[tuple[int, int, int, int], ...]
    levels: tuple[StateLevel, ...]

    @cached_property
    def stepped(self) -> Tensor:
        return torch.cat([level.rows for level in self.levels])

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Those before and behind the stepped rows, int64."""

        def numbers(slots: Tensor | slice) -> Tensor:
            return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots

        before = [numbers(level.before) for level in self.levels]
        return torch.cat(before), torch.cat([numbers(level.behind) for level in self.levels])


class StateStore:
    """Slots of states, and whose they are. It starts with ``slots`` of them, and grows if a caller
    without a scheduler takes more. ``parts``: a state's tensors, by layer."""

    def __init__(
        self, parts: Sequence[Sequence[StatePart]], slots: int, device: torch.device
    ) -> None:
        self.pool = BlockPool(slots + 1)
        self.zero = self.pool.allocate(1)[0]  # before a text's first token
        self._device = device
        self._layers = [
            [torch.zeros(slots + 1, *shape, dtype=dtype, device=device) for shape, dtype in layer]
            for layer in parts
        ]
        self._slots: dict[int, dict[int, int]] = {}  # by sequence and logical index
        self._promised: dict[int, int] = {}

    def layer(self, layer: int) -> list[Tensor]:
        """A layer's tensors, ``[slots, ...]``."""
        return self._layers[layer]

    def has(self, digest: bytes) -> bool:
        """Whether the state behind a block is kept."""
        return self.pool.find(digest) is not None

    def admit(self, seq_id: int, length: int, digest: bytes | None) -> None:
        """Start a sequence behind ``length`` tokens that it shares, in blocks up to ``digest``."""
        self._slots[seq_id] = {}
        if digest is not None:
            slot = self.pool.find(digest)
            assert slot is not None, "a shared prefix without its state"
            self.pool.retain(slot)
            self._slots[seq_id][length - 1] = slot

    def reserve(self, seq_id: int, nodes: int) -> None:
        """Promise a step's slots. Raises OutOfBlocksError if there are none for its ``nodes``."""
        before = sum(count for other, count in self._promised.items() if other != seq_id)
        if nodes and before + PENDING_SLOTS + nodes > self.pool.available:
            raise OutOfBlocksError(f"{nodes} states wanted, {self.pool.available} available")
        self._promised[seq_id] = PENDING_SLOTS + nodes

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """As PagedCache.move."""
        taken = [(seq, target, self._slots[seq][source]) for seq, source, target in moves]
        for _, _, slot in taken:
            self.pool.retain(slot)
        for seq, target, slot in taken:
            self._drop(seq, target)
            self._slots[seq][target] = slot

    def register(self, seq_id: int, index: int, digest: bytes) -> None:
        """Let a full block's state be found, if the step has made it."""
        slot = self._slots[seq_id].get(index)
        if slot is not None:
            self.pool.register(slot, digest)

    def commit(self, seq_id: int, length: int) -> None:
        """Keep the state behind the first ``length`` tokens."""
        self._promised.pop(seq_id, None)
        slots = self._slots[seq_id]
        for index in [index for index in slots if index != length - 1]:
            self.pool.release(slots.pop(index))

    def free(self, seq_id: int) -> None:
        """Give back all slots of a sequence."""
        self._promised.pop(seq_id, None)
        for slot in self._slots.pop(seq_id, {}).values():
            self.pool.release(slot)

    def route(self, batch: Batch, block_size: int) -> StateStep:
        """Take the slots that a forward writes."""
        chunks: list[tuple[int, int, int, int]] = []
        levels: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for span in batch.spans:
            self._promised.pop(span.seq_id, None)
            self._route(span, block_size, chunks, levels)
        made, start = [], 0
        for _, level in sorted(levels.items()):
            rows, *slots = to_device(list(zip(*level, strict=True)), self._device)
            if len(level) == 1:  # then a view will do
                slots = [slice(slot, slot + 1) for slot in level[0][1:]]
            made.append(StateLevel(rows, slice(start, start + len(level)), *slots))
            start += len(level)
        return StateStep(tuple(chunks), tuple(made))

    def _route(
        self,
        span: Span,
        size: int,
        chunks: list[tuple[int, int, int, int]],
        levels: defaultdict[int, list[tuple[int, int, int]]],
    ) -> None:
        base, level = span.context + span.pending, 0
        if span.pending:
            source, begin = self._slot(span.seq_id, span.context - 1), span.context
            stepped = begin > 0 and span.pending <= _STEPPED
            for end in (base - 1) // size * size, base:
                if end <= begin:
                    continue
                slot, row = self._new(span.seq_id, end - 1), span.start + begin - span.context
                if not stepped:
                    chunks.append((row, row + end - begin, source, slot))
                for step in range(end - begin if stepped else 0):
                    levels[level].append((row + step, slot if step else source, slot))
                    level += 1
                source, begin = slot, end
        row = span.start + span.pending
        made: dict[int, int] = {}  # levels of this forward's nodes
        parents = span.parents if span.ancestors is None else parents_of(span.ancestors)
        for node in range(span.first_new, len(parents)):
            parent = parents[node]
            source = self._slot(span.seq_id, base + parent)
            made[node] = made[parent] + 1 if parent in made else level
            slot = self._new(span.seq_id, base + node)
            levels[made[node]].append((row + node - span.first_new, source, slot))

    def _slot(self, seq_id: int, index: int) -> int:
        slots = self._slots.get(seq_id, {})
        if index in slots:
            return slots[index]
        # Start-up measures behind tokens that were never read.
        assert index < 0 or seq_id < 0, f"sequence {seq_id} has no state behind token {index}"
        return self.zero

    def _new(self, seq_id: int, index: int) -> int:
        self._drop(seq_id, index)  # of a draft by the target, or of a step that was undone
        if not self.pool.available:
            self._grow()
        slot = self._slots[seq_id][index] = self.pool.allocate(1)[0]
        return slot

    def _drop(self, seq_id: int, index: int) -> None:
        slot = self._slots.setdefault(seq_id, {}).pop(index, None)
        if slot is not None:
            self.pool.release(slot)

    def _grow(self) -> None:
        self._layers = [[torch.cat((t, torch.zeros_like(t))) for t in ts] for ts in self._layers]
        self.pool.grow(self.pool.total)
