"""What the machine makes of a pair: dtype, device, and memory for weights and cache."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from paceline.build import most_kept
from paceline.core.memory import free_memory, held_memory
from paceline.drafters import BLOCK_SIZE
from paceline.kernels.compile import are_kernels_here
from paceline.lab.doctor.findings import ERROR, Finding, finding
from paceline.model.backends.base import REFERENCE
from paceline.model.loading import cpu_has_bf16, dtype_to_load, resolve_device
from paceline.model.offload import OffloadPlan
from paceline.model.paged.cache import blocks_within
from paceline.model.paged.int8 import cache_dtype

_SHARE = 4  # by default the cache takes at most one part in so many of the free memory
_LARGE = 1 << 30  # bytes of weights from which on a processor is slow


@dataclass(frozen=True)
class DeviceSettings:
    """How a pair would be run. ``kv_cache_memory`` in bytes, None for the engine's choice;
    ``cache_dtype`` of the target's keys and values."""

    device: torch.device
    dtype: torch.dtype | None  # None: as the checkpoint has it
    max_batch_size: int = 8
    kv_cache_memory: int | None = None
    cache_dtype: torch.dtype = torch.bfloat16
    kernels: bool = False  # whether the native ones are expected to run

    @classmethod
    def of(
        cls,
        dtype: str,
        device: str,
        max_batch_size: int,
        kv_cache_memory: int | None,
        kv_cache_dtype: str = "auto",
        backend: str = "auto",
    ) -> DeviceSettings:
        """Raises ConfigError on a device or dtype that there is not."""
        device_used = resolve_device(device)
        dtype_used = dtype_to_load(dtype, device_used, backend)
        cached = cache_dtype(kv_cache_dtype, dtype_used or torch.bfloat16)
        setting = cls(device_used, dtype_used, max_batch_size, kv_cache_memory, cached)
        return replace(setting, kernels=setting.has_kernels(backend))

    def has_kernels(self, backend: str) -> bool:
        """Whether there are native kernels for what a backend runs here."""
        return self.device.type == "cpu" and backend != REFERENCE and are_kernels_here()


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a pair takes: ``weights``, and of the cache for every token.

    ``feature_bytes`` are those of a token's features, of which heads keep some. ``loading``: at the
    most before there is a cache, pages of the files included.
    """

    weights: int
    cache_bytes: int
    positions: int  # of the target
    feature_bytes: int = 0
    loading: int = 0


def check_dtype(setting: DeviceSettings, weights: int) -> Iterator[Finding]:
    """Whether a forward over a draft's rows costs about what one over a single row costs."""
    if setting.device.type != "cpu":
        name = "the checkpoint's own dtype" if setting.dtype is None else _name(setting.dtype)
        text = f"{name} on {torch.cuda.get_device_name(setting.device)}"
        emulated = setting.dtype in (None, torch.bfloat16) and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        yield finding("bfloat16-emulated" if emulated else "dtype-suits", "machine", text)
        return
    bf16 = "with" if cpu_has_bf16() else "without"
    text = f"{_name(setting.dtype)} on a processor ({platform.machine()}) {bf16} bf16 instructions"
    slow = {torch.float32: "verify-float32", torch.float16: "float16-on-cpu"}
    if not cpu_has_bf16() and setting.kernels:
        text += ", which the native kernels do without"
    usual = "dtype-suits" if cpu_has_bf16() or setting.kernels else "bfloat16-emulated"
    yield finding(slow.get(setting.dtype or torch.bfloat16, usual), "machine", text)
    if weights >= _LARGE:
        seen = torch.cuda.device_count()
        text = f"weights of {size(weights)} on the processor; PyTorch sees {seen} GPUs"
        yield finding("gpu-absent", "machine", text)


def check_memory(setting: DeviceSettings, load: MemoryNeeds) -> Finding:
    """Whether weights and cache fit into what is free now."""
    free = free_memory(setting.device)
    if load.weights > free:
        text = f"weights of {size(load.weights)}, but {size(free)} of memory are free"
        return finding("memory-short", "machine", text)
    left = free - load.weights
    budget = left // _SHARE if setting.kv_cache_memory is None else setting.kv_cache_memory
    kept = most_kept(setting.max_batch_size)
    blocks = blocks_within(budget, load.cache_bytes, load.feature_bytes, kept, BLOCK_SIZE)
    tokens = blocks * BLOCK_SIZE
    context, batch = load.positions, setting.max_batch_size
    text = (
        f"weights of {size(load.weights)}, {size(load.cache_bytes)} of cache a token, "
        f"{size(free)} free: the cache holds {tokens:,} tokens{_at_its_peak(setting, load, blocks)}"
    )
    if setting.kv_cache_memory is not None and setting.kv_cache_memory > left:
        text = f"a cache of {size(setting.kv_cache_memory)}, but {size(left)} of memory remain"
        return finding("memory-short", "machine", text)
    if tokens < 2 * BLOCK_SIZE:
        return finding("cache-short", "machine", text, ERROR)
    if tokens < context:
        return finding("cache-short", "machine", f"{text}; one context is {context:,}")
    if tokens < batch * context:
        whole = f"{text}; {batch} sequences of {context:,} would be {batch * context:,}"
        return finding("cache-partial", "machine", whole)
    enough = f"{text}, more than {batch} sequences of {context:,} need"
    return finding("memory-fits", "machine", enough)


def _at_its_peak(setting: DeviceSettings, load: MemoryNeeds, blocks: int) -> str:
    """What the process takes while it loads, or with the weights and all of the cache, in words.

    On a processor only: there Python and the libraries count, which this process holds as well.
    """
    held = held_memory() if setting.device.type == "cpu" else None
    if held is None:
        return ""
    wanted = setting.max_batch_size * (-(-load.positions // BLOCK_SIZE) + 1)
    cache = min(blocks, wanted) * BLOCK_SIZE * load.cache_bytes
    most = max(load.loading, load.weights + cache)
    return f", and the process at its peak {size(held + most)}"


def check_offload(plan: OffloadPlan, offload: str) -> Finding:
    """What a forward moves, of layers that do not stay on the device."""
    if not plan.away:
        text = f"all {plan.layers} layers fit the device, so none stays on {offload}"
        return finding("offload-idle", "machine", text)
    text = (
        f"{plan.away} of {plan.layers} layers stay on {offload}: every forward moves "
        f"{size(plan.moved)}, {plan.moved / 2**30:.2g} s at 1 GiB a second"
    )
    return finding("weights-offloaded", "machine", text)


def size(count: float) -> str:
    """Bytes for people: 20.0 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(max(1.0, count)) // 10)))
    return f"{count / 1024**power:.{min(1, power)}f} {units[power]}"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
