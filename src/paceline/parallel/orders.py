"""What rank 0 tells the other ranks: plain data, sent over a CPU group.

What of a batch only rank 0's device knows, tokens that it has just drafted, follows as one tensor
over the group of the devices: rank 0 need not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Batch


@dataclass(frozen=True)
class CacheOrder:
    """A cache by its number, and what a rank needs to make its part of one that it lacks.

    ``dropped``: numbers of caches that rank 0 has let go of.
    """

    number: int
    blocks: int
    block_size: int
    dtype: torch.dtype
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchOrder:
    """Run a forward: ``batch`` is what the host knows of it. Of trees that only the device knows
    the rest follows: ``nodes``, first row and number of their tokens, and the sides of their
    ``ancestors``."""

    cache: CacheOrder
    batch: Batch
    nodes: tuple[tuple[int, int], ...] = ()
    ancestors: tuple[int | None, ...] = ()

    @property
    def following(self) -> int:
        """Numbers that follow on the devices."""
        return sum(count for _, count in self.nodes) + sum((n or 0) ** 2 for n in self.ancestors)

    def whole(self, numbers: torch.Tensor) -> Batch:
        """The batch with what followed, int64 ``[following]``."""
        sizes = [count for _, count in self.nodes] + [(n or 0) ** 2 for n in self.ancestors]
        parts = iter(torch.split(numbers, sizes) if sizes else ())
        nodes = tuple((first, next(parts)) for first, _ in self.nodes)
        masks = [(side, next(parts)) for side in self.ancestors]
        ancestors = tuple(None if n is None else part.view(n, n).bool() for n, part in masks)
        return replace(self.batch, nodes=nodes, ancestors=ancestors)


@dataclass(frozen=True)
class MoveOrder:
    """Copy rows of a cache from slots to slots."""

    cache: CacheOrder
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GatherOrder:
    """Put the parts of a module's parameters together, ``part`` "input" or "output" embedding."""

    part: str


@dataclass(frozen=True)
class MemoryOrder:
    """Find the least free memory of all ranks."""


@dataclass(frozen=True)
class StopOrder:
    """The last one."""


Order = BatchOrder | MoveOrder | GatherOrder | MemoryOrder | StopOrder


def batch_order(cache: CacheOrder, batch: Batch) -> tuple[BatchOrder, torch.Tensor | None]:
    """An order for a forward, and the numbers that follow it, if any."""
    order = BatchOrder(
        cache,
        replace(batch, nodes=(), ancestors=()),
        tuple((first, len(tokens)) for first, tokens in batch.nodes),
        tuple(None if mask is None else len(mask) for mask in batch.ancestors),
    )
    if not order.following:
        return order, None
    device_only = [tokens for _, tokens in batch.nodes] + [
        mask.flatten().to(torch.int64) for mask in batch.ancestors if mask is not None
    ]
    return order, torch.cat(device_only)
