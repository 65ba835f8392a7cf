"""The process groups of tensor-parallel ranks: one of their devices, one of CPUs for orders."""

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
# Orders are plain data, sent over the CPU group. Drafted tokens that only rank 0's device knows
# follow as one tensor over the device group, so that rank 0 need not wait for them.


@dataclass(frozen=True)
class BatchOrder:
    """The order to run a forward. ``batch``: without its tensors. ``nodes``: (first row, count) of
    the token tensors that follow; ``ancestors``: for each span the side length of the mask that
    follows, None if it has none."""

    batch: Batch
    nodes: tuple[tuple[int, int], ...]
    ancestors: tuple[int | None, ...]

    @classmethod
    def of(cls, batch: Batch) -> tuple[BatchOrder, torch.Tensor | None]:
        """Make the order for a batch, and the tensor of numbers to send after it, if any."""
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
        """The sizes of the parts of the tensor that follows."""
        return [count for _, count in self.nodes] + [(side or 0) ** 2 for side in self.ancestors]

    def whole(self, numbers: torch.Tensor) -> Batch:
        """The complete batch, given the tensor that followed, int64 ``[sum(sizes)]``."""
        parts = iter(torch.split(numbers, self.sizes))
        nodes = tuple((first, next(parts)) for first, _ in self.nodes)
        spans = tuple(
            span if side is None else replace(span, ancestors=mask.view(side, side).bool())
            for span, side, mask in zip(self.batch.spans, self.ancestors, parts, strict=True)
        )
        return replace(self.batch, nodes=nodes, spans=spans)


_TIMEOUT = timedelta(minutes=30)  # how long ranks wait for each other, also while loading
_FOREVER = timedelta(days=3650)  # between orders; processes.py notices a lost rank
_LOOPBACK = "lo"


class RankGroup:
    """The process groups from the side of rank ``rank`` of ``size``, which runs on ``device``;
    they are made in ``rank_environment``."""

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        """Join the groups; waits for all ranks. ``store``: a file that all ranks can access."""
        self.rank, self.size, self.device = rank, size, device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if cuda else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def broadcast(self, method: str, *arguments: Any) -> None:
        """Order the other ranks to call this method of ``Follower`` (shared.py), or to "stop"."""
        dist.broadcast_object_list([method, arguments], src=0, group=self._control)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next order; returns the method and its arguments."""
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=0, group=self._control)
        return received[0], received[1]

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's ``numbers``; on other ranks the tensor is overwritten with them."""
        dist.broadcast(numbers, src=0)
        return numbers

    def least_memory(self) -> int:
        """Free bytes of the rank that has the least; the ranks of a CPU share its memory evenly."""
        share = 1 if self.device.type == "cuda" else self.size
        free_bytes = torch.tensor(free_memory(self.device) // share, device=self.device)
        dist.all_reduce(free_bytes, dist.ReduceOp.MIN)
        return int(free_bytes)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a module itself, gathered from all ranks. All ranks must call this."""
    from torch.distributed.tensor import DTensor

    # torch 2.11 cannot gather in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.named_parameters(recurse=False)
        }


@contextmanager
def rank_environment(rank: int) -> Iterator[None]:
    """Set environment variables while process groups are made and weights are loaded: the device,
    and the loopback interface unless the user names one. Loopback matters, as ranks unpickle what
    they receive."""
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
