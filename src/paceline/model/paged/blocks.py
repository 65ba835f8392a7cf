"""Allocation of cache blocks, with reference counts and prefix sharing by content.

    free + reusable + used == total

Used blocks belong to sequences. Reusable blocks belong to none but hold the keys and values of a
known prefix; they are evicted oldest first. Free blocks are empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from paceline.errors import PacelineError


class OutOfBlocksError(PacelineError):
    """Fewer blocks are free or reusable than needed; the scheduler then preempts a sequence."""


def prefix_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block and all before it; cryptographic, as a collision changes answers."""
    digest = blake2b(parent, digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


class BlockPool:
    """Hands out block ids ``0 .. total - 1``."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: dict[int, None] = dict.fromkeys(range(total))
        self._refs = [0] * total
        self._digest: dict[int, bytes] = {}  # registered block -> content
        self._by_digest: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._starts = 0

    @property
    def available(self) -> int:
        """How many blocks can be allocated."""
        return len(self._free) + len(self._reusable)

    def in_use(self, block: int) -> bool:
        """Whether a sequence uses the block, so that sharing it leaves ``available`` unchanged."""
        return self._refs[block] > 0

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate ``count`` blocks, if possible consecutive ones that follow block ``after``.
        Raises OutOfBlocksError, and then allocates nothing."""
        if count > self.available:
            raise OutOfBlocksError(f"{count} cache blocks wanted, {self.available} available")
        blocks: list[int] = []
        hint = self._start() if after is None else after + 1
        for _ in range(count):
            if hint not in self._free:
                hint = self._evict() if not self._free else next(iter(self._free))
            del self._free[hint]
            self._refs[hint] = 1
            blocks.append(hint)
            hint += 1
        return blocks

    def grow(self, count: int) -> None:
        """Add ``count`` free blocks."""
        self._free |= dict.fromkeys(range(self.total, self.total + count))
        self._refs += [0] * count
        self.total += count

    def _start(self) -> int:
        """The first block of a new sequence. Sequences start spread over the pool, so that each can
        grow in consecutive blocks."""
        self._starts += 1
        # Bit-reversed counting: 0, 1/2, 1/4, 3/4, 1/8, ... of the pool.
        reverse = int(f"{self._starts % 64:06b}"[::-1], 2)
        return reverse * self.total // 64

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        del self._by_digest[self._digest.pop(block)]
        self._free[block] = None
        return block

    def retain(self, block: int) -> None:
        """Count one more owner of a registered block."""
        self._reusable.pop(block, None)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Count one owner less. Without owners a block is free, or reusable if it is registered."""
        self._refs[block] -= 1
        assert self._refs[block] >= 0, f"block {block} released too often"
        if self._refs[block] == 0:
            if block in self._digest:
                self._reusable[block] = None
            else:
                self._free[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full, committed block known to ``find``; the first block with a content counts."""
        if digest not in self._by_digest and block not in self._digest:
            self._by_digest[digest] = block
            self._digest[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The registered block with this content, if any."""
        return self._by_digest.get(digest)
