"""What this machine can do at best, which limit holds a phase of the step up, and that in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.lab.profiling.work import Work
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


MEMORY, COMPUTE, LAUNCH, PYTHON = "memory bandwidth", "compute", "kernel launches", "Python"
SATURATED = 0.5  # share of the machine's best from which the limit takes most of the time


@dataclass(frozen=True)
class Phase:
    """One phase in a step without the profiler, and its ``work``.

    ``kernels + launches + python == seconds``: in products and attention (on CUDA: in any kernel);
    in calling them and in all other operators; between operators. ``share`` of the step.
    ``bandwidth``: bytes/s that the machine reads at best; ``peak_flops``: FLOP/s at best.
    """

    name: str
    seconds: float
    kernels: float
    launches: float
    python: float
    work: Work
    share: float
    bandwidth: float
    peak_flops: float

    @property
    def bytes_per_second(self) -> float:
        return _by(self.work.bytes, self.seconds)

    @property
    def flops_per_second(self) -> float:
        return _by(self.work.flops, self.seconds)

    @property
    def of_read_bandwidth(self) -> float:
        return _by(self.bytes_per_second, self.bandwidth)

    @property
    def of_peak_flops(self) -> float:
        return _by(self.flops_per_second, self.peak_flops)

    @property
    def saturated(self) -> bool:
        return max(self.of_read_bandwidth, self.of_peak_flops) >= SATURATED

    @property
    def bound(self) -> str:
        """Memory or compute, the nearer, if it is saturated or products and attention take most of
        the time; else calls or Python, whichever takes longer."""
        if self.saturated or self.kernels > self.launches + self.python:
            return MEMORY if self.of_read_bandwidth >= self.of_peak_flops else COMPUTE
        return LAUNCH if self.launches >= self.python else PYTHON

    @property
    def label(self) -> str:
        """The bound; "nearest to" where products and attention do not reach their limit."""
        near = self.bound in (MEMORY, COMPUTE) and not self.saturated
        return f"nearest to {self.bound}" if near else f"bound by {self.bound}"

    def explain(self) -> str:
        """What holds this phase up, with the figures that say so, and what would help."""
        limit = ""
        if self.bound == MEMORY:
            limit = f" ({self.of_read_bandwidth:.0%} of {rate(self.bandwidth)})"
        elif self.bound == COMPUTE:
            limit = f" ({self.of_peak_flops:.0%} of {self.peak_flops / 1e9:.3g} GFLOP/s)"
        parts = (self.kernels, self.launches, self.python)
        kernels, calls, python = (f"{_by(part, self.seconds):.0%}" for part in parts)
        helps = _HELPS[self.name][self.bound if self.saturated else None]
        return (
            f"{self.name}: {1e3 * self.seconds:.3g} ms, {self.label}{limit}. Products and "
            f"attention take {kernels} of it, calling its {self.work.ops:.0f} operators {calls}, "
            f"Python between them {python}. What helps: {helps}."
        )


def _by(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


_FEWER_STEPS = "fewer steps (longer drafts) or more sequences in each"
_FEWER_PASSES = "fewer passes (shorter drafts, heads of several tokens), or lookups (ngram)"
_FEWER_ROWS = "fewer rows (shorter drafts, smaller trees, fewer sequences)"
# Where memory or compute is saturated, and what saves calls and Python where neither is.
_HELPS: dict[str, dict[str | None, str]] = {
    "target": {
        MEMORY: "fewer bytes (a smaller dtype or quantised weights), or more tokens for the same "
        "bytes (longer drafts, more sequences)",
        COMPUTE: f"{_FEWER_ROWS}: each takes its time here",
        None: "more tokens in each forward (longer drafts, more sequences): they cost little here",
    },
    "draft": {
        MEMORY: f"a smaller draft, {_FEWER_PASSES}",
        COMPUTE: "a smaller draft, or shorter drafts",
        None: _FEWER_PASSES,
    },
    "verify": {
        MEMORY: f"{_FEWER_ROWS}, or greedy decoding",
        COMPUTE: _FEWER_ROWS,
        None: _FEWER_STEPS,
    },
    "other": dict.fromkeys((MEMORY, COMPUTE, None), _FEWER_STEPS),
}
