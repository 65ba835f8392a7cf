"""Peak speeds of this machine, and which of them limits the target's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.engine.driver import StepTotals
from paceline.lab.report.document import NOTES
from paceline.llm import LLM
from paceline.model.loading import cpu_has_bf16
from paceline.model.measure import measure
from paceline.model.paged.cache import bytes_per_token
from paceline.model.precision import matrix_sizes

_MIN_READ = 64 * 2**10  # bytes: for a smaller sum the call would take longer than the reading
_READ = 32 * 2**20  # bytes read per timing; a smaller buffer is read repeatedly


@dataclass(frozen=True)
class MachineSpeeds:
    """``read_bandwidth``: bytes/s of a sum over as many bytes as a plain step reads.
    ``peak_flops``: FLOP/s of a product of many rows with a cached weight."""

    device: str
    dtype: str
    threads: int
    read_bandwidth: float
    peak_flops: float


@torch.inference_mode()
def measure_machine(device: torch.device, dtype: torch.dtype, size: int) -> MachineSpeeds:
    """Measure the peak speeds, of reading with ``size`` bytes; takes about a second."""
    side, rows = (4096, 4096) if device.type == "cuda" else (1024, 256)
    if device.type == "cpu" and not cpu_has_bf16():
        dtype = torch.float32  # without bf16 instructions torch emulates; our kernels use float32
    linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    x = torch.ones(rows, side, device=device, dtype=dtype)
    return MachineSpeeds(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        read_bandwidth=read_bandwidth(device, size),
        peak_flops=2 * rows * side * side / _seconds(lambda: linear(x), device, 1),
    )


@torch.inference_mode()
def read_bandwidth(device: torch.device, size: int) -> float:
    """Bytes/s of repeated sums over ``size`` bytes, which a cache serves if they fit into it."""
    data = torch.ones(max(_MIN_READ, size) // 4, device=device)
    times = max(1, _READ // (4 * data.numel()))
    return 4 * data.numel() / _seconds(data.sum, device, times)


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Time of one call of ``times`` in a row: the best of several rounds, as noise only adds."""

    def repeat(_: int) -> None:
        for _ in range(times):
            run()

    return measure(repeat, [1], device).seconds[0] / times


MEMORY, COMPUTE, NEITHER = "memory bandwidth", "compute", "neither"
SATURATED = 0.5  # share of a peak speed from which that limit takes most of the time


@dataclass(frozen=True)
class Forward:
    """The target's forward in a step: its ``seconds``, the ``bytes`` that it reads, ``flops`` (two
    per multiply-add of its matrices), and the ``machine`` on which it ran."""

    seconds: float
    bytes: float
    flops: float
    machine: MachineSpeeds

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def of_read_bandwidth(self) -> float:
        return self.bytes_per_second / self.machine.read_bandwidth

    @property
    def of_peak_flops(self) -> float:
        return self.flops_per_second / self.machine.peak_flops

    @property
    def bound(self) -> str:
        """The limit that is nearer to its peak, if it is saturated."""
        if max(self.of_read_bandwidth, self.of_peak_flops) < SATURATED:
            return NEITHER
        return MEMORY if self.of_read_bandwidth >= self.of_peak_flops else COMPUTE

    def explain(self) -> str:
        """What limits the forward, with its figures, and what would help."""
        read, peak = rate(self.machine.read_bandwidth), f"{self.machine.peak_flops / 1e9:.3g}"
        return (
            f"It reaches {self.of_read_bandwidth:.0%} of the read bandwidth ({read}) and "
            f"{self.of_peak_flops:.0%} of the large product's speed ({peak} GFLOP/s): "
            f"{NOTES['profile']['bound'][self.bound]}."
        )


def step_work(llm: LLM, sums: StepTotals) -> tuple[float, float]:
    """Bytes and FLOPs of the target's forward in an average step: its matrices are read once, keys
    and values by each sequence."""
    cache, sizes = llm.engine.cache, list(matrix_sizes(llm.target.hf))
    context, rows = sums.context / sums.steps, (sums.sequences + sums.drafted) / sums.steps
    cached = context * bytes_per_token(llm.target.cache_shapes, cache.dtype)
    elements = sum(matrix.elements for matrix in sizes)
    return sum(matrix.bytes for matrix in sizes) + cached, 2 * rows * elements


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
