"""The paged key/value cache: block tables per sequence, commit and rollback, prefix sharing.

A sequence's cache is addressed by logical index, ``slot = table[i // size] * size + i % size``::

    | committed, cached | scheduled (pending) | tree nodes, one index each |
    0 ............ context .......... context + pending ......................

A commit moves the nodes of the accepted path to the indices behind the pending tokens (a chain's
are there already) and frees everything beyond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core import transfer
from paceline.core.batch import Batch, Span
from paceline.core.transfer import to_device
from paceline.errors import CacheMemoryError
from paceline.model.paged.blocks import BlockPool, prefix_digest
from paceline.model.paged.int8 import stored_width
from paceline.model.paged.states import StateStore

LayerShape = tuple[int, int, int]  # kv heads, key width, value width


@dataclass
class _Table:
    blocks: list[int]
    digests: list[bytes]  # of the full committed blocks, in order
    long: bool = False  # rotated with the long factors, see PagedCache
    adapter: int = 0  # its number; 0: none


def _parent(table: _Table) -> bytes:
    """The digest before that of the next block; at first, the root of what is computed alike."""
    if table.digests:
        return table.digests[-1]
    return f"{table.long} {table.adapter}".encode()


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token over all layers; ``dtype`` is the cache's."""
    widths = sum(heads * sum(stored_width(w, dtype) for w in (k, v)) for heads, k, v in shapes)
    return widths * dtype.itemsize


def blocks_within(memory: int, per_token: int, per_feature: int, kept: int, block_size: int) -> int:
    """Blocks of a cache that takes ``memory`` bytes: ``per_token`` bytes for a token and
    ``per_feature`` for its features, which drafters keep of at most ``kept`` cached tokens."""
    all_kept = memory // (block_size * (per_token + per_feature))
    few_kept = (memory - kept * per_feature) // (block_size * per_token)
    return max(all_kept, few_kept)


def path_moves(seq_id: int, base: int, path: Sequence[int]) -> list[tuple[int, int, int]]:
    """Moves (see PagedCache.move) of a path's nodes to ``base, base + 1, ...``."""
    return [(seq_id, base + node, base + rank) for rank, node in enumerate(path) if node != rank]


class PagedCache:
    """Keys and values of all layers in fixed blocks of ``block_size`` tokens.

    ``dtype`` int8 keeps them in 8 bits (int8.py). With ``share`` full blocks are found again by
    their content, by any sequence that begins alike. ``rope_switch``: keys of a sequence with more
    tokens are rotated otherwise (longrope). A sequence is admitted as short or as long and stays
    so. Short and long ones share no blocks, nor do those with different adapters. ``states`` of
    recurrent layers go the same way; a prefix is shared up to a block whose state is kept. Raises
    CacheMemoryError if the device has no memory for it."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        share: bool = True,
        rope_switch: int | None = None,
        states: StateStore | None = None,
    ) -> None:
        self.shares, self.rope_switch, self.states = share, rope_switch, states
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype, self.device = dtype, torch.device(device)
        self._separate = transfer.has_separate_memory(self.device)
        slots = num_blocks * block_size
        parts = [(heads, stored_width(w, dtype)) for heads, *widths in shapes for w in widths]
        # Layers of one size in one tensor: rows of all are copied at once. Zeros, not empty: padded
        # gathers read unwritten slots, and NaN * 0 is NaN.
        try:
            self._stacks = {
                size: torch.zeros(count, slots, *size, dtype=dtype, device=device)
                for size, count in Counter(parts).items()
            }
        except RuntimeError as error:  # of torch's allocators
            taken = slots * bytes_per_token(shapes, dtype)
            raise CacheMemoryError(
                f"no memory on {device} for a cache of {taken:,} bytes; lower kv_cache_memory"
            ) from error
        layers = {size: iter(stack) for size, stack in self._stacks.items()}
        tensors = [next(layers[size]) for size in parts]
        self._layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, _Table] = {}
        # Called with the slots of every move, for other processes that have a part of the cache.
        self.moved: Callable[[Sequence[tuple[int, int]]], None] | None = None

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[num_slots, kv_heads, width]``, in 8 bits ``width + 4``."""
        return self._layers[layer]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def admit(
        self, seq_id: int, tokens: Sequence[int], share: bool = True, adapter: int = 0
    ) -> int:
        """Start a sequence; returns how many leading tokens are cached already: whole blocks, and
        never the last token, whose logits are wanted. 0 without ``share``."""
        assert seq_id not in self._tables, f"sequence {seq_id} is in the cache already"
        table = _Table([], [], self._is_long(len(tokens)), adapter)
        if share:
            self._add_prefix(table, tokens)
        for block in table.blocks:
            self.pool.retain(block)
        self._tables[seq_id] = table
        length = len(table.blocks) * self.block_size
        if self.states is not None:
            self.states.admit(seq_id, length, table.digests[-1] if table.digests else None)
        return length

    def shared_blocks(self, tokens: Sequence[int], adapter: int = 0) -> list[int]:
        """Blocks that ``admit`` would share with a sequence of these tokens."""
        table = _Table([], [], self._is_long(len(tokens)), adapter)
        self._add_prefix(table, tokens)
        return table.blocks

    def _is_long(self, length: int) -> bool:
        return self.rope_switch is not None and length > self.rope_switch

    def outgrown(self, seq_id: int, length: int) -> bool:
        """Whether a sequence has become long, so that its keys must be computed again."""
        return self._is_long(length) and not self._tables[seq_id].long

    def _add_prefix(self, table: _Table, tokens: Sequence[int]) -> None:
        """Give an empty table the cached blocks of a prefix of these tokens."""
        size = self.block_size
        for start in range(0, len(tokens) - size, size) if self.shares else ():
            parent = _parent(table)
            digest = prefix_digest(parent, tokens[start : start + size])
            block = self.pool.find(digest)
            if block is None:
                break
            table.blocks.append(block)
            table.digests.append(digest)
        while self.states is not None and table.digests and not self.states.has(table.digests[-1]):
            del table.blocks[-1], table.digests[-1]

    def blocks_of(self, seq_id: int) -> Sequence[int]:
        return self._tables[seq_id].blocks

    def blocks_missing(self, seq_id: int, length: int) -> int:
        """Blocks to be allocated before ``length`` logical indices can be written."""
        have = len(self._tables[seq_id].blocks) if seq_id in self._tables else 0
        return max(0, -(-length // self.block_size) - have)

    def reserve(self, seq_id: int, length: int, nodes: int = 0) -> None:
        """Make ``length`` logical indices writable, the last for a draft's ``nodes``. Raises
        OutOfBlocksError, taking nothing."""
        if self.states is not None:
            self.states.reserve(seq_id, nodes)
        missing = self.blocks_missing(seq_id, length)
        if missing:
            blocks = self._tables[seq_id].blocks
            blocks.extend(self.pool.allocate(missing, blocks[-1] if blocks else None))

    def commit(self, seq_id: int, tokens: Sequence[int], length: int) -> None:
        """Keep the first ``length`` indices, which hold ``tokens[:length]``; free the rest."""
        table = self._tables[seq_id]
        size = self.block_size
        keep = -(-length // size)
        for block in table.blocks[keep:]:
            self.pool.release(block)
        del table.blocks[keep:]
        while self.shares and (len(table.digests) + 1) * size <= length:
            index, parent = len(table.digests), _parent(table)
            digest = prefix_digest(parent, tokens[index * size : (index + 1) * size])
            table.digests.append(digest)
            self.pool.register(table.blocks[index], digest)
            if self.states is not None:
                self.states.register(seq_id, (index + 1) * size - 1, digest)
        if self.states is not None:
            self.states.commit(seq_id, length)

    def free(self, seq_id: int) -> None:
        """Give back all blocks of a sequence, if it was admitted."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            # Last block first: the end of a prefix is worth less than its beginning.
            for block in reversed(table.blocks):
                self.pool.release(block)
        if self.states is not None:
            self.states.free(seq_id)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy rows ``(seq_id, from index, to index)`` in all layers, reading before writing."""
        if not moves:
            return
        slots = [(self._slot(seq, src), self._slot(seq, dst)) for seq, src, dst in moves]
        if self.moved is not None:
            self.moved(slots)
        self.copy(slots)
        if self.states is not None:
            self.states.move(moves)

    @torch.inference_mode()
    def copy(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy rows from slots to slots in all layers, reading before writing."""
        source, target = to_device(slots, self.device).unbind(1)
        for stack in self._stacks.values():
            stack.index_copy_(1, target, stack.index_select(1, source))

    def _slot(self, seq_id: int, index: int) -> int:
        size = self.block_size
        return self._tables[seq_id].blocks[index // size] * size + index % size

    def batch_of(
        self, spans: Sequence[Span], features: Sequence[int] = (), choices_only: bool = False
    ) -> Batch:
        """One ragged batch of the spans, whose indices must have been reserved."""
        batched: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        on_device: list[tuple[int, torch.Tensor]] = []
        size, separate = self.block_size, self._separate
        for part in spans:
            row, table = len(ids), self._tables[part.seq_id]
            span = part.at(row, len(wanted) + part.scored, table.long)
            batched.append(span)
            ids.extend(span.tokens)
            nodes = span.nodes
            if not isinstance(nodes, torch.Tensor):
                ids.extend(nodes)
            elif separate:
                on_device.append((len(ids), nodes))
                ids.extend([0] * len(nodes))
            else:
                ids.extend(nodes.tolist())
            positions.extend(span.positions)
            blocks = table.blocks
            slots.extend([blocks[i // size] * size + i % size for i in span.indices])
            wanted.extend(range(row, row + span.scored))
            if span.wants_logits:
                wanted.extend(range(row + max(0, span.pending - 1), len(ids)))
        return Batch(
            ids,
            positions,
            slots,
            spans=tuple(batched),
            tables=tuple([tuple(self._tables[span.seq_id].blocks) for span in spans]),
            logit_rows=wanted if len(wanted) < len(ids) else None,
            nodes=tuple(on_device),
            features=features,
            choices_only=choices_only,
        )
