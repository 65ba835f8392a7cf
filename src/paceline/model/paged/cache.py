"""The paged KV cache: a block table per sequence, commit and rollback, prefix sharing.

A sequence's entries have logical indices, ``slot = table[index // size] * size + index % size``::

    | committed, cached | scheduled (pending) | tree nodes, one index each |
    0 ............ context .......... context + pending ......................

A commit moves the nodes of the accepted path to the indices after the pending tokens (the nodes of
a chain are already there) and frees everything after them.
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

LayerShape = tuple[int, int, int]  # KV heads, key width, value width


@dataclass
class _Table:
    """A sequence's blocks; ``digests`` are those of its full committed blocks, in order."""

    blocks: list[int]
    digests: list[bytes]
    long: bool = False  # RoPE uses the long factors, see PagedCache
    adapter: int = 0  # number of the LoRA adapter, 0 for none


def _parent(table: _Table) -> bytes:
    """The parent digest for the table's next block. For the first block it is made of what changes
    keys and values besides the tokens: the RoPE factors and the adapter."""
    if table.digests:
        return table.digests[-1]
    return f"{table.long} {table.adapter}".encode()


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers of a cache in ``dtype``."""
    widths = sum(heads * sum(stored_width(w, dtype) for w in (k, v)) for heads, k, v in shapes)
    return widths * dtype.itemsize


def blocks_within(memory: int, per_token: int, per_feature: int, kept: int, block_size: int) -> int:
    """How many blocks fit into ``memory`` bytes: a cached token takes ``per_token`` bytes, and its
    features ``per_feature`` bytes more; drafters keep features of at most ``kept`` tokens."""
    all_kept = memory // (block_size * (per_token + per_feature))
    few_kept = (memory - kept * per_feature) // (block_size * per_token)
    return max(all_kept, few_kept)


def path_moves(seq_id: int, base: int, path: Sequence[int]) -> list[tuple[int, int, int]]:
    """The arguments of ``PagedCache.move`` that move a path's nodes to ``base, base + 1, ...``."""
    return [(seq_id, base + node, base + rank) for rank, node in enumerate(path) if node != rank]


class PagedCache:
    """The keys and values of all layers, in blocks of ``block_size`` tokens.

    ``dtype`` int8 stores them in 8 bits (int8.py). With ``share``, sequences with the same prefix
    share full blocks, which are found by a hash of their content. ``rope_switch``: sequences of
    more tokens use the long RoPE factors (longrope). A sequence is admitted as short or long and
    stays so; short and long ones share no blocks, nor do sequences with different adapters.
    ``states``: the states of recurrent layers; a prefix is shared up to a block whose state is
    kept. Raises CacheMemoryError if the device has too little memory."""

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
        # Layers of one size are stacked in one tensor, so that one call copies rows in all of them.
        # Zeros, not empty: padded gathers read unwritten slots, and NaN * 0 is NaN.
        try:
            self._stacks = {
                size: torch.zeros(count, slots, *size, dtype=dtype, device=device)
                for size, count in Counter(parts).items()
            }
        except RuntimeError as error:  # torch's allocators raise it
            taken = slots * bytes_per_token(shapes, dtype)
            raise CacheMemoryError(
                f"no memory on {device} for a cache of {taken:,} bytes; lower kv_cache_memory"
            ) from error
        layers = {size: iter(stack) for size, stack in self._stacks.items()}
        tensors = [next(layers[size]) for size in parts]
        self._layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, _Table] = {}
        # Called with the slots of every move; ranks with a part of the cache repeat it.
        self.on_move: Callable[[Sequence[tuple[int, int]]], None] | None = None

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[slots, kv_heads, width]``; in int8 ``width + 4``."""
        return self._layers[layer]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def admit(
        self, seq_id: int, tokens: Sequence[int], share: bool = True, adapter: int = 0
    ) -> int:
        """Start a sequence; returns how many of its first tokens are already cached. These are
        whole blocks, never with the last token, whose logits are needed. 0 without ``share``."""
        assert seq_id not in self._tables, f"sequence {seq_id} is in the cache already"
        table = self._prefix(tokens, adapter, share)
        for block in table.blocks:
            self.pool.retain(block)
        self._tables[seq_id] = table
        length = len(table.blocks) * self.block_size
        if self.states is not None:
            self.states.admit(seq_id, length, table.digests[-1] if table.digests else None)
        return length

    def shared_blocks(self, tokens: Sequence[int], adapter: int = 0) -> list[int]:
        """The blocks that ``admit`` would share with a sequence of these tokens."""
        return self._prefix(tokens, adapter).blocks

    def _is_long(self, length: int) -> bool:
        return self.rope_switch is not None and length > self.rope_switch

    def outgrown(self, seq_id: int, length: int) -> bool:
        """Whether a sequence of ``length`` tokens needs the long RoPE factors but was admitted as
        short: all its keys must be computed again."""
        return self._is_long(length) and not self._tables[seq_id].long

    def _prefix(self, tokens: Sequence[int], adapter: int, share: bool = True) -> _Table:
        """A table with the cached blocks of the longest known prefix; empty without ``share``."""
        table, size = _Table([], [], self._is_long(len(tokens)), adapter), self.block_size
        for start in range(0, len(tokens) - size, size) if share and self.shares else ():
            parent = _parent(table)
            digest = prefix_digest(parent, tokens[start : start + size])
            block = self.pool.find(digest)
            if block is None:
                break
            table.blocks.append(block)
            table.digests.append(digest)
        while self.states is not None and table.digests and not self.states.has(table.digests[-1]):
            del table.blocks[-1], table.digests[-1]
        return table

    def blocks_of(self, seq_id: int) -> Sequence[int]:
        return self._tables[seq_id].blocks

    def blocks_missing(self, seq_id: int, length: int) -> int:
        """How many blocks must be allocated before ``length`` logical indices can be written."""
        have = len(self._tables[seq_id].blocks) if seq_id in self._tables else 0
        return max(0, -(-length // self.block_size) - have)

    def reserve(self, seq_id: int, length: int, nodes: int = 0) -> None:
        """Allocate blocks for ``length`` logical indices, the last for a draft's ``nodes``. Raises
        OutOfBlocksError, and then allocates nothing."""
        if self.states is not None:
            self.states.reserve(seq_id, nodes)
        missing = self.blocks_missing(seq_id, length)
        if missing:
            blocks = self._tables[seq_id].blocks
            blocks.extend(self.pool.allocate(missing, blocks[-1] if blocks else None))

    def commit(self, seq_id: int, tokens: Sequence[int], length: int) -> None:
        """Keep the first ``length`` indices, which hold ``tokens[:length]``, and free the rest."""
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
            # Last block first: the oldest released is evicted first, and a prefix is useless
            # without its beginning.
            for block in reversed(table.blocks):
                self.pool.release(block)
        if self.states is not None:
            self.states.free(seq_id)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy entries ``(seq_id, from index, to index)`` in all layers, reading before writing."""
        if not moves:
            return
        slots = [(self._slot(seq, src), self._slot(seq, dst)) for seq, src, dst in moves]
        if self.on_move is not None:
            self.on_move(slots)
        self.copy(slots)
        if self.states is not None:
            self.states.move(moves)

    @torch.inference_mode()
    def copy(self, slots: Sequence[tuple[int, int]]) -> None:
        """Like ``move``, with entries ``(from slot, to slot)``."""
        source, target = to_device(slots, self.device).unbind(1)
        for stack in self._stacks.values():
            stack.index_copy_(1, target, stack.index_select(1, source))

    def _slot(self, seq_id: int, index: int) -> int:
        size = self.block_size
        return self._tables[seq_id].blocks[index // size] * size + index % size

    def batch_of(
        self, spans: Sequence[Span], features: Sequence[int] = (), choices_only: bool = False
    ) -> Batch:
        """Pack the spans into one ragged batch; their logical indices must be reserved."""
        batched: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        on_device: list[tuple[int, torch.Tensor]] = []
        size = self.block_size
        for unplaced in spans:
            row, table = len(ids), self._tables[unplaced.seq_id]
            span = unplaced.placed(row, len(logit_rows) + unplaced.scored, table.long)
            batched.append(span)
            ids.extend(span.tokens)
            nodes = span.nodes
            if not isinstance(nodes, torch.Tensor):
                ids.extend(nodes)
            elif self._separate:
                on_device.append((len(ids), nodes))
                ids.extend([0] * len(nodes))  # placeholders: only the device knows these tokens
            else:
                ids.extend(nodes.tolist())
            positions.extend(span.positions)
            blocks = table.blocks
            slots.extend([blocks[i // size] * size + i % size for i in span.indices])
            logit_rows.extend(range(row, row + span.scored))
            if span.wants_logits:
                logit_rows.extend(range(row + max(0, span.pending - 1), len(ids)))
        return Batch(
            ids,
            positions,
            slots,
            spans=tuple(batched),
            tables=tuple([tuple(self._tables[span.seq_id].blocks) for span in spans]),
            logit_rows=logit_rows if len(logit_rows) < len(ids) else None,
            nodes=tuple(on_device),
            features=features,
            choices_only=choices_only,
        )
