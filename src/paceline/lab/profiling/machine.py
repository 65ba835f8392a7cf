"""What this machine can do at best: bandwidths, products, and the price of calling an operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.model.measure import measure

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SMALLEST_BUFFER, _LARGEST_BUFFER = 64 * 2**20, 512 * 2**20  # bytes
_LEAST_READ = 64 * 2**10  # bytes, below which a sum takes longer to be called than to be done
_READ = 32 * 2**20  # bytes read in one timing, again and again where the buffer is smaller
# Calls in one timing: so few that a scheduler's time slice has room for several timings.
_CALLS, _FEW_CALLS = 1000, 50


def load_per_processor() -> float:
    """Programs that want to run, over the last minute, by processors; 0 where nobody counts."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


@dataclass(frozen=True)
class MachineSpeeds:
    """Measured on the device, with the dtype and the threads of the run. Bandwidths in bytes/s.

    ``copy_bandwidth`` counts bytes read AND bytes written, over buffers of ``buffer_bytes`` that
    no cache holds; ``read_bandwidth`` is that of a sum over such a buffer. ``cache_bytes``: the
    last-level cache, None if unknown. ``products``: pairs of rows and FLOP/s of linear products
    whose weight stays in the cache. ``op_seconds``: a call of an operator that does next to
    nothing, from Python; ``product_seconds``: one of the smallest product, which is its fixed cost.
    """

    device: str
    dtype: str
    threads: int
    copy_bandwidth: float
    read_bandwidth: float
    buffer_bytes: int
    cache_bytes: int | None
    products: tuple[tuple[int, float], ...]
    op_seconds: float
    product_seconds: float

    @property
    def peak_flops(self) -> float:
        """FLOP/s of the fastest product: no number of rows does better here."""
        return max(rate for _, rate in self.products)

    def fits_cache(self, size: int) -> bool:
        return self.cache_bytes is not None and size <= self.cache_bytes


@torch.inference_mode()
def measure_machine(device: torch.device, dtype: torch.dtype, rows: Sequence[int]) -> MachineSpeeds:
    """Bandwidths, operator price, and products of ``rows`` rows (and of many); about 3 seconds."""
    cache = last_level_cache(device)
    size = min(max(_SMALLEST_BUFFER, 4 * (cache or 0)), _LARGEST_BUFFER)
    return MachineSpeeds(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        copy_bandwidth=_copy_bandwidth(device, size),
        read_bandwidth=read_bandwidth(device, size),
        buffer_bytes=size,
        cache_bytes=cache,
        products=_product_rates(device, dtype, rows),
        op_seconds=_op_seconds(device),
        product_seconds=_product_seconds(device, dtype),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, size: int) -> float:
    """Bytes/s of sums over ``size`` bytes, again and again: from a cache if they fit into one."""
    data = torch.ones(max(_LEAST_READ, size) // 4, device=device)
    times = max(1, _READ // (4 * data.numel()))
    return times * 4 * data.numel() / _seconds(lambda: _repeat(data.sum, times), device)


def last_level_cache(device: torch.device, root: Path = _CACHES) -> int | None:
    """Bytes of the cache in front of the memory; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    rates: list[tuple[int, int]] = []
    for folder in root.glob("index*"):
        try:
            level = int((folder / "level").read_text())
            size = (folder / "size").read_text().strip()
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            rates.append((level, int(size[:-1]) * unit))
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(rates)[1] if rates else None


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of some rounds: noise on a shared machine only ever adds."""
    return measure(lambda _: (run(), None)[1], [1], device).seconds[0]


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def _copy_bandwidth(device: torch.device, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * size / _seconds(lambda: copy.copy_(source), device)


def _product_rates(
    device: torch.device, dtype: torch.dtype, rows: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """FLOP/s by rows."""
    side, many = (4096, 4096) if device.type == "cuda" else (1024, 256)
    linear = _linear(side, device, dtype)
    rates = []
    for count in sorted({1, *rows, many}):
        x = torch.ones(count, side, device=device, dtype=dtype)
        times = max(1, 64 // count)
        # One binding per lambda: it is called before the loop goes on.
        seconds = _seconds(lambda: _repeat(lambda: linear(x), times), device)  # noqa: B023
        rates.append((count, times * 2 * count * side * side / seconds))
    return tuple(rates)


def _linear(side: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    linear, x = _linear(16, device, dtype), torch.ones(1, 16, device=device, dtype=dtype)
    return _seconds(lambda: _repeat(lambda: linear(x), _FEW_CALLS), device) / _FEW_CALLS


def _op_seconds(device: torch.device) -> float:
    """On CUDA the queue soon fills, so this is what a launch takes or what the device takes for
    an empty kernel, whichever is longer."""
    one = torch.zeros(1, device=device)
    return _seconds(lambda: _repeat(one.neg_, _CALLS), device) / _CALLS
