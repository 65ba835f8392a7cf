"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy a (nested) list of numbers to a tensor on ``device``. On CUDA the copy does not block:
    the caching host allocator keeps the pinned memory until the copy is done."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to ``device``; returns the same tensor if that is the CPU."""
    target = torch.device(device)
    if target.type == "cuda":
        return host.pin_memory().to(target, non_blocking=True)
    return host.to(target)


def has_separate_memory(device: torch.device) -> bool:
    """Whether host data must be copied before the device can read it."""
    return device.type != "cpu"


class HostCopy:
    """An asynchronous copy of integers from a device to the host. ``values`` waits for the work
    that was queued on the device before the copy, but not for later work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._event: Any = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The stream of the copy's device, which may not be the current device.
            self._event.record(torch.cuda.current_stream(tensor.device))

    def values(self) -> list[int]:
        """Wait for the copy and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._host.tolist()
        return values


class Staging:
    """Collects the inputs of one forward and copies them to the device in one transfer.
    ``numbers`` int64 and ``masks`` bool, of any shapes, are host tensors before ``send`` and device
    tensors after it; numbers are transferred as int32. On the CPU (``direct``) nothing is
    copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.direct = not has_separate_memory(device)
        self.numbers: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []

    def add(self, values: Sequence[int] | torch.Tensor) -> int:
        """Add a tensor of integers; returns its index in ``numbers``."""
        self.numbers.append(torch.as_tensor(values, dtype=torch.int64))
        return len(self.numbers) - 1

    def add_mask(self, mask: torch.Tensor) -> int:
        """Add a bool tensor; returns its index in ``masks``."""
        self.masks.append(mask)
        return len(self.masks) - 1

    def send(self) -> None:
        """Copy everything to the device in one transfer."""
        if self.direct or not (self.numbers or self.masks):
            return
        flat = [torch.empty(0, dtype=torch.int64), *(part.flatten() for part in self.numbers)]
        numbers = torch.cat(flat).to(torch.int32)
        masks = [part.flatten().view(torch.uint8) for part in self.masks]
        whole = upload(torch.cat([numbers.view(torch.uint8), *masks]), self.device)
        size = 4 * len(numbers)
        self.numbers = _split_like(whole[:size].view(torch.int32).to(torch.int64), self.numbers)
        self.masks = _split_like(whole[size:].view(torch.bool), self.masks)


def _split_like(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the flat tensor ``joined`` into tensors of the shapes of ``like``."""
    parts = torch.split(joined, [part.numel() for part in like])
    return [part.view(other.shape) for part, other in zip(parts, like, strict=True)]
