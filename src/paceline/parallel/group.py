"""The process groups of all ranks: one of their devices, and one of CPUs for orders."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.batch import Batch
from paceline.core.memory import free_memory

# -- orders of rank 0 to the other ranks ----------------------------------------------------------
# Plain data, sent over the CPU group. Tokens of a batch that only rank 0's device knows, which were
# just drafted, follow as one tensor over the device group, so that rank 0 does not wait for them.


@dataclass(frozen=True)
class BatchOrder:
    """``batch`` as the host knows it. ``nodes``: first row and number of tokens that follow;
    ``ancestors``: side of the mask that follows, by span."""

    batch: Batch
    nodes: tuple[tuple[int, int], ...]
    ancestors: tuple[int | None, ...]

    @classmethod
    def of(cls, batch: Batch) -> tuple[BatchOrder, torch.Tensor | None]:
        """The order, and the numbers that follow it, if any."""
        masks = [span.ancestors for span in batch.spans]
        order = cls(
            replace(batch, nodes=(), features=()),  # pickled spans have no tensors
            tuple((first, len(tokens)) for first, tokens in batch.nodes),
            tuple(None if mask is None else len(mask) for mask in masks),
        )
        numbers = [tokens for _, tokens in batch.nodes]
        numbers += [mask.flatten().to(torch.int64) for mask in masks if mask is not None]
        return order, torch.cat(numbers) if numbers else None

    @property
    def sizes(self) -> list[int]:
        """Of the parts of the numbers that follow."""
        return [count for _, count in self.nodes] + [(side or 0) ** 2 for side in self.ancestors]

    def whole(self, numbers: torch.Tensor) -> Batch:
        """The batch with the numbers that followed, int64 ``[sum(sizes)]``."""
        parts = iter(torch.split(numbers, self.sizes))
        nodes = tuple((first, next(parts)) for first, _ in self.nodes)
        spans = tuple(
            span if side is None else replace(span, ancestors=mask.view(side, side).bool())
            for span, side, mask in zip(self.batch.spans, self.ancestors, parts, strict=True)
        )
        return replace(self.batch, nodes=nodes, spans=spans)


_LOADING = timedelta(hours=1)  # for which ranks wait for each other while they load
_FOREVER = timedelta(days=3650)  # between orders; a lost rank is noticed by processes.py
_LOOPBACK = "lo"


class RankGroup:
    """The groups as rank ``rank`` of ``size`` has them, which computes on ``device``."""

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        """Waits for all ranks. ``store``: a file that all of them see."""
        self.rank, self.size, self.device = rank, size, device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        with rank_environment(rank):
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=dist.FileStore(store, size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=_LOADING,
                device_id=device if cuda else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Have the others call this method of ``Follower`` (worker.py), or ``stop``."""
        dist.broadcast_object_list([method, arguments], src=0, group=self._control)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """The next order: method and arguments."""
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=0, group=self._control)
        return received[0], received[1]

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's ``numbers`` into those of all ranks."""
        dist.broadcast(numbers, src=0)
        return numbers

    def least_memory(self) -> int:
        """Bytes that every rank has free; on a CPU its memory is divided by the ranks."""
        free = free_memory(self.device)
        free_bytes = torch.tensor(free if self.device.type == "cuda" else free // self.size)
        dist.all_reduce(free_bytes, dist.ReduceOp.MIN, group=self._control)
        return int(free_bytes)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's direct parameters, gathered of all ranks; all ranks must call."""
    from torch.distributed.tensor import DTensor

    with torch.inference_mode(False), torch.no_grad():  # torch 2.11 gathers in no inference mode
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.named_parameters(recurse=False)
        }


@contextmanager
def rank_environment(rank: int) -> Iterator[None]:
    """Environment variables while groups are made and weights are loaded: the device, and loopback
    unless the user names an interface, as ranks unpickle what they receive."""
    wanted = {"LOCAL_RANK": str(rank)}
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - {*os.environ}
        wanted |= dict.fromkeys(names, _LOOPBACK)
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)
