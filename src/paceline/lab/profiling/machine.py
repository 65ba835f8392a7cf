"""What this machine can do at best: bandwidth, products, and the price of a product's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.model.loading import cpu_has_bf16
from paceline.model.measure import measure

_BUFFER = 256 * 2**20  # bytes, more than caches hold
_LEAST_READ = 64 * 2**10  # bytes, below which a sum takes longer to be called than to be done
_READ = 32 * 2**20  # bytes read in one timing, again and again where the buffer is smaller
_CALLS = 50  # in one timing: few enough for several timings in a scheduler's time slice


@dataclass(frozen=True)
class MachineSpeeds:
    """``read_bandwidth``: bytes/s of a sum over a buffer that no cache holds. ``peak_flops``: FLOP
    a second of a product of many rows whose weight is cached. ``product_seconds``: a call of the
    smallest product."""

    device: str
    dtype: str
    threads: int
    read_bandwidth: float
    peak_flops: float
    product_seconds: float


@torch.inference_mode()
def measure_machine(device: torch.device, dtype: torch.dtype) -> MachineSpeeds:
    """Takes about 2 seconds."""
    side, rows = (4096, 4096) if device.type == "cuda" else (1024, 256)
    if device.type == "cpu" and not cpu_has_bf16():
        dtype = torch.float32  # torch emulates bf16 there; the kernels multiply in float32
    return MachineSpeeds(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        read_bandwidth=read_bandwidth(device, _BUFFER),
        peak_flops=2 * rows * side * side / _product_seconds(side, rows, device, dtype, 1),
        product_seconds=_product_seconds(16, 1, device, dtype, _CALLS),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, size: int) -> float:
    """Bytes/s of sums over ``size`` bytes, again and again: from a cache if they fit into one."""
    data = torch.ones(max(_LEAST_READ, size) // 4, device=device)
    times = max(1, _READ // (4 * data.numel()))
    return 4 * data.numel() / _seconds(data.sum, device, times)


def _product_seconds(
    side: int, rows: int, device: torch.device, dtype: torch.dtype, times: int
) -> float:
    linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    x = torch.ones(rows, side, device=device, dtype=dtype)
    return _seconds(lambda: linear(x), device, times)


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one call, of ``times`` in a row: the best of some rounds, as noise only ever adds."""

    def repeat(_: int) -> None:
        for _ in range(times):
            run()

    return measure(repeat, [1], device).seconds[0] / times
