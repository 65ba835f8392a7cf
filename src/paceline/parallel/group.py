"""The process groups of all ranks: one of their devices, and one of CPUs for what they are told."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.batch import Batch
from paceline.core.memory import free_memory

# -- what rank 0 tells the other ranks: plain data, sent over the CPU group ------------------------
# What of a batch only rank 0's device knows, tokens that it has just drafted, follows as one tensor
# over the group of the devices: rank 0 need not wait for them.


class Order(NamedTuple):
    """A method of ``Follower`` (worker.py) that all ranks run together, or ``stop``."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class BatchOrder:
    """``batch`` is what the host knows of it. Of trees that only the device knows the rest follows:
    ``nodes``, first row and number of their tokens, and the sides of their ``ancestors``."""

    batch: Batch
    nodes: tuple[tuple[int, int], ...]
    ancestors: tuple[int | None, ...]

    @property
    def sizes(self) -> list[int]:
        """Of the tensors that follow, as one, on the devices."""
        masks = [(side or 0) ** 2 for side in self.ancestors]
        return [count for _, count in self.nodes] + masks

    def whole(self, numbers: torch.Tensor) -> Batch:
        """The batch with what followed, int64 ``[sum(sizes)]``."""
        parts = iter(torch.split(numbers, self.sizes))
        nodes = tuple((first, next(parts)) for first, _ in self.nodes)
        spans = []
        for span, side, mask in zip(self.batch.spans, self.ancestors, parts, strict=True):
            ancestors = None if side is None else mask.view(side, side).bool()
            spans.append(span if ancestors is None else replace(span, ancestors=ancestors))
        return replace(self.batch, nodes=nodes, spans=tuple(spans))


def batch_order(batch: Batch) -> tuple[BatchOrder, torch.Tensor | None]:
    """What is told of a batch, and the numbers that follow it, if any."""
    masks = [span.ancestors for span in batch.spans]
    order = BatchOrder(
        replace(batch, nodes=(), features=()),  # spans leave their tensors behind
        tuple((first, len(tokens)) for first, tokens in batch.nodes),
        tuple(None if mask is None else len(mask) for mask in masks),
    )
    device_only = [tokens for _, tokens in batch.nodes]
    device_only += [mask.flatten().to(torch.int64) for mask in masks if mask is not None]
    return order, torch.cat(device_only) if device_only else None


# How long ranks may wait for each other while they load; a disk is not equally fast for all.
_LOADING = timedelta(hours=1)
# An idle server may tell its ranks nothing for months; who has gone is noticed by other means.
_FOREVER = timedelta(days=3650)
_LOOPBACK = "lo"


class RankGroup:
    """This process's place in the groups: ``rank`` of ``size``, computing on ``device``."""

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        """Waits until all ranks have come. ``store`` is a file that all of them see."""
        self.rank, self.size, self.device = rank, size, device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        with surroundings(rank):
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=dist.FileStore(store, size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=_LOADING,
                device_id=device if cuda else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def broadcast(self, order: Order) -> None:
        """Of rank 0: all others hear it."""
        dist.broadcast_object_list([order], src=0, group=self._control)

    def hear(self) -> Order:
        """Wait for the next order."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._control)
        return Order(*received[0])

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``numbers`` in those of all ranks, in place."""
        dist.broadcast(numbers, src=0)
        return numbers

    def least_memory(self) -> int:
        """Bytes that every rank has free; ranks on one processor have equal parts of its own."""
        free = free_memory(self.device)
        free_bytes = torch.tensor(free if self.device.type == "cuda" else free // self.size)
        dist.all_reduce(free_bytes, dist.ReduceOp.MIN, group=self._control)
        return int(free_bytes)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters, put together of the parts that the ranks have; all must call."""
    from torch.distributed.tensor import DTensor

    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.named_parameters(recurse=False)
    }


@contextmanager
def surroundings(rank: int) -> Iterator[None]:
    """What libraries read from the environment while groups are made and weights are loaded. Which
    device is this process's; and that ranks listen to this machine only, unless the user says
    otherwise: what they receive is unpickled."""
    here = any(name == _LOOPBACK for _, name in socket.if_nameindex())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    wanted = {name: _LOOPBACK for name in names if here and name not in os.environ}
    wanted["LOCAL_RANK"] = str(rank)
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)
