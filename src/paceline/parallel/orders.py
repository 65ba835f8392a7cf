"""What rank 0 tells the other ranks: plain data, sent over a CPU group.

The numbers of a batch may be known to rank 0's device only, so they follow as one tensor over the
group of the devices; an order says how long it is and how it falls into the batch's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchOrder:
    """Run a forward: ``plain`` are the batch's fields without numbers, ``tensors`` the name, length
    and dtype of the others, in the order in which they follow."""

    cache: CacheOrder
    plain: dict[str, Any]
    tensors: tuple[tuple[str, int, torch.dtype], ...]

    @property
    def length(self) -> int:
        return sum(length for _, length, _ in self.tensors)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """The batch, from the int64 ``[length]`` that followed."""
        values, first = dict(self.plain), 0
        for name, length, dtype in self.tensors:
            values[name] = numbers[first : first + length].to(dtype)
            first += length
        return Batch(**values)


@dataclass(frozen=True)
class MoveOrder:
    """Copy ``count`` rows of a cache; their slots follow, int64 ``[2 * count]``: from, then to."""

    cache: CacheOrder
    count: int


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


def batch_order(cache: CacheOrder, batch: Batch) -> tuple[BatchOrder, torch.Tensor]:
    """An order for a forward, and the numbers that follow it."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    order = BatchOrder(
        cache,
        {name: value for name, value in values.items() if name not in tensors},
        tuple((name, len(value), value.dtype) for name, value in tensors.items()),
    )
    return order, torch.cat([value.to(torch.int64) for value in tensors.values()])
