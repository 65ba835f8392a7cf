"""The process groups of all ranks: one of their devices, and one of CPUs for what they are told."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.memory import free_memory
from paceline.parallel.orders import Order

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

    def tell(self, order: Order) -> None:
        """Of rank 0: all others hear it."""
        dist.broadcast_object_list([order], src=0, group=self._control)

    def hear(self) -> Order:
        """Wait for the next order."""
        found: list[Order] = [None]  # type: ignore[list-item]
        dist.broadcast_object_list(found, src=0, group=self._control)
        return found[0]

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``numbers`` in those of all ranks, in place."""
        dist.broadcast(numbers, src=0)
        return numbers

    def least_memory(self) -> int:
        """Bytes that every rank has free; ranks on one processor have equal parts of its own."""
        free = free_memory(self.device)
        own = torch.tensor(free if self.device.type == "cuda" else free // self.size)
        dist.all_reduce(own, dist.ReduceOp.MIN, group=self._control)
        return int(own)

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
    """What libraries read from the environment while groups are made and weights are loaded.

    Which device is this process's; and that ranks listen to this machine only, unless the user
    says otherwise: what they receive is unpickled.
    """
    here = any(name == _LOOPBACK for _, name in socket.if_nameindex())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    wanted = {name: _LOOPBACK for name in names if here and name not in os.environ}
    wanted["LOCAL_RANK"] = str(rank)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
