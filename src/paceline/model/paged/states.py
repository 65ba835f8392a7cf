"""States of recurrent layers, beside the paged KV cache. A slot holds one state of all layers.

A state belongs to the token after which it was computed, as a key does, so a sequence's states are
addressed by logical index (see cache.py). A forward writes into new slots, never into one that
another row reads. So rejected drafts and undone steps need no restoring, samples of one prompt
share a slot, and the state at the end of a full block is found again by the block's content::

    pending tokens  a chunk: from the state before it to the state after its last token
    tree nodes      one row each, from the parent's state; the rows of a level run together
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
PENDING_SLOTS = 2  # pending tokens write two states: after their last full block, and at their end
_MAX_STEPPED = 8  # so few pending tokens go row by row: chunks are padded to 64 or 256 tokens


def bytes_per_state(parts: Sequence[Sequence[StatePart]]) -> int:
    """Bytes of one state of all layers."""
    return sum(
        torch.Size(shape).numel() * dtype.itemsize for layer in parts for shape, dtype in layer
    )


@dataclass(frozen=True)
class StateLevel:
    """Rows that advance together by one token. ``rows`` int64 ``[n]``: their indices in the batch;
    ``span``: their part of the rows of all levels; ``before`` and ``after``: the slots that they
    read and write, int64 ``[n]`` or a slice of one slot."""

    rows: Tensor
    span: slice
    before: Tensor | slice
    after: Tensor | slice


@dataclass(frozen=True)
class StateStep:
    """How the rows of a batch go through a recurrent layer: first the ``chunks``, in order, as
    (first row, end row, slot before, slot after), then the ``levels``."""

    chunks: tuple[tuple[int, int, int, int], ...]
    levels: tuple[StateLevel, ...]

    @cached_property
    def stepped(self) -> Tensor:
        """The rows of all levels, int64."""
        return torch.cat([level.rows for level in self.levels])

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """The slots before and after the rows of all levels, int64."""

        def numbers(slots: Tensor | slice) -> Tensor:
            return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots

        before = [numbers(level.before) for level in self.levels]
        return torch.cat(before), torch.cat([numbers(level.after) for level in self.levels])


class StateStore:
    """Allocates slots of states, and knows which sequence and index each belongs to. It starts with
    ``slots`` slots, and grows if a caller without a scheduler takes more. ``parts``: the tensors of
    a state, by layer."""

    def __init__(
        self, parts: Sequence[Sequence[StatePart]], slots: int, device: torch.device
    ) -> None:
        self.pool = BlockPool(slots + 1)
        self.zero = self.pool.allocate(1)[0]  # the state before the first token of a text
        self._device = device
        self._layers = [
            [torch.zeros(slots + 1, *shape, dtype=dtype, device=device) for shape, dtype in layer]
            for layer in parts
        ]
        self._slots: dict[int, dict[int, int]] = {}  # by sequence and logical index
        self._reserved: dict[int, int] = {}  # slots that each sequence may take in this step

    def layer(self, layer: int) -> list[Tensor]:
        """A layer's state tensors, each ``[slots, ...]``."""
        return self._layers[layer]

    def has(self, digest: bytes) -> bool:
        """Whether the state at the end of the block with this digest is kept."""
        return self.pool.find(digest) is not None

    def admit(self, seq_id: int, length: int, digest: bytes | None) -> None:
        """Start a sequence that shares its first ``length`` tokens, in blocks up to ``digest``."""
        self._slots[seq_id] = {}
        if digest is not None:
            slot = self.pool.find(digest)
            assert slot is not None, "a shared prefix without its state"
            self.pool.retain(slot)
            self._slots[seq_id][length - 1] = slot

    def reserve(self, seq_id: int, nodes: int) -> None:
        """Reserve a step's slots. Raises OutOfBlocksError if too few are left for ``nodes``."""
        others = sum(count for other, count in self._reserved.items() if other != seq_id)
        if nodes and others + PENDING_SLOTS + nodes > self.pool.available:
            raise OutOfBlocksError(f"{nodes} states wanted, {self.pool.available} available")
        self._reserved[seq_id] = PENDING_SLOTS + nodes

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Give logical indices the states of others; ``moves`` as in ``PagedCache.move``."""
        moved = [(seq, target, self._slots[seq][source]) for seq, source, target in moves]
        for _, _, slot in moved:
            self.pool.retain(slot)
        for seq, target, slot in moved:
            self._drop(seq, target)
            self._slots[seq][target] = slot

    def register(self, seq_id: int, index: int, digest: bytes) -> None:
        """Make the state at the end of a full block known to ``has``, if the step computed it."""
        slot = self._slots[seq_id].get(index)
        if slot is not None:
            self.pool.register(slot, digest)

    def commit(self, seq_id: int, length: int) -> None:
        """Keep the state after the first ``length`` tokens, and free the sequence's others."""
        self._reserved.pop(seq_id, None)
        slots = self._slots[seq_id]
        for index in [index for index in slots if index != length - 1]:
            self.pool.release(slots.pop(index))

    def free(self, seq_id: int) -> None:
        """Free all slots of a sequence."""
        self._reserved.pop(seq_id, None)
        for slot in self._slots.pop(seq_id, {}).values():
            self.pool.release(slot)

    def route(self, batch: Batch, block_size: int) -> StateStep:
        """Allocate the slots that a forward over ``batch`` writes, and plan its step."""
        chunks: list[tuple[int, int, int, int]] = []
        # By level: (row, slot before, slot after).
        levels: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for span in batch.spans:
            self._reserved.pop(span.seq_id, None)
            self._route(span, block_size, chunks, levels)
        state_levels, start = [], 0
        for _, level in sorted(levels.items()):
            rows, *slots = to_device(list(zip(*level, strict=True)), self._device)
            if len(level) == 1:  # a slice indexes without a copy
                slots = [slice(slot, slot + 1) for slot in level[0][1:]]
            state_levels.append(StateLevel(rows, slice(start, start + len(level)), *slots))
            start += len(level)
        return StateStep(tuple(chunks), tuple(state_levels))

    def _route(
        self,
        span: Span,
        size: int,
        chunks: list[tuple[int, int, int, int]],
        levels: defaultdict[int, list[tuple[int, int, int]]],
    ) -> None:
        """Add a span's rows to ``chunks`` and ``levels``. Its pending tokens are split at the end
        of their last full block, whose state is kept for sharing."""
        base, level = span.context + span.pending, 0
        if span.pending:
            source, begin = self._slot(span.seq_id, span.context - 1), span.context
            stepped = begin > 0 and span.pending <= _MAX_STEPPED
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
        node_levels: dict[int, int] = {}  # of the nodes in this forward
        parents = span.parents if span.ancestors is None else parents_of(span.ancestors)
        for node in range(span.first_new, len(parents)):
            parent = parents[node]
            source = self._slot(span.seq_id, base + parent)
            node_levels[node] = node_levels[parent] + 1 if parent in node_levels else level
            slot = self._new(span.seq_id, base + node)
            levels[node_levels[node]].append((row + node - span.first_new, source, slot))

    def _slot(self, seq_id: int, index: int) -> int:
        """The slot with the state after the token at ``index``."""
        slots = self._slots.get(seq_id, {})
        if index in slots:
            return slots[index]
        # Negative ids: start-up measures forwards after tokens that never were prefilled.
        assert index < 0 or seq_id < 0, f"sequence {seq_id} has no state after token {index}"
        return self.zero

    def _new(self, seq_id: int, index: int) -> int:
        """Allocate a slot for the state after the token at ``index``."""
        self._drop(seq_id, index)  # left by a draft of the target itself, or by an undone step
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
