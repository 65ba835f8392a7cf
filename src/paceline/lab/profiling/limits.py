"""Peak speeds of this machine, and which of them bounds a phase of the decoding step.

The bytes and FLOPs of a step are counted operator by operator: a weight each time that a matrix
product reads it, and the keys and values that attention reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.lab.report.document import NOTES
from paceline.model.backends.counters import OPERATOR, NativeWork, counted
from paceline.model.loading import cpu_has_bf16
from paceline.model.measure import measure

# Matrix products, with the index of the rows among the arguments; the weight is the next argument.
_PRODUCTS = dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::matmul", "aten::linear"), 0)
_PRODUCTS |= {"aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0}
_PRODUCTS |= {"aten::addmm": 1, "aten::baddbmm": 1}
_BATCHED = frozenset({"aten::bmm", "aten::matmul"})
_ATTENTION = ("aten::scaled_dot_product_", "aten::_scaled_dot_product_")


def is_kernel(name: str) -> bool:
    """Whether an operator is a matrix product or attention, which do nearly all the work."""
    return name in _PRODUCTS or name.startswith((OPERATOR, *_ATTENTION, "aten::einsum"))


@dataclass
class Work:
    """The work of one phase. ``ops``: operator calls; ``kernels``: those of matrix products and
    attention. ``weight_bytes``: bytes of weights, counted at every read; ``weights``: elements and
    bytes of each distinct weight. ``cache_bytes``: bytes of keys and values that are read."""

    ops: float = 0
    kernels: float = 0
    flops: float = 0
    weight_bytes: float = 0
    cache_bytes: float = 0
    weights: dict[object, tuple[int, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes

    @property
    def parameters(self) -> int:
        """Distinct weight elements that were read."""
        return sum(elements for elements, _ in self.weights.values())

    @property
    def weight_bits(self) -> float:
        """Bits per weight element as it is read, scales included."""
        size = sum(size for _, size in self.weights.values())
        return 8 * size / self.parameters if self.weights else 0.0

    def per_step(self, steps: int) -> Work:
        """The work of one step, if this is the sum over ``steps`` steps."""
        sums = {name: value / steps for name, value in vars(self).items() if name != "weights"}
        return Work(**sums, weights=self.weights)

    def add_product(self, key: object, elements: int, size: int, flops: int) -> None:
        """Count a matrix product with a weight of ``size`` bytes."""
        self.flops += flops
        self.weight_bytes += size
        self.weights[key] = (elements, size)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators called within ``phase("step")``, by innermost phase, else as "other"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Work] = {}
        self.steps = 0
        self._phase = "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "step":
            self.steps += 1
            with self, counted(self._native):
                yield
            return
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def _native(self, done: NativeWork) -> None:
        """Count a call of our own kernels as one operator."""
        work = self.phases.setdefault(self._phase, Work())
        work.ops += 1
        work.kernels += 1
        for weight in done.products:
            flops = 2 * weight.elements * weight.rows
            work.add_product(weight.key, weight.elements, weight.bytes, flops)
        work.flops += done.attention_flops
        work.cache_bytes += done.cache_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name == "aten::einsum":  # decomposed, so that its products are counted one by one
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        work = self.phases.setdefault(self._phase, Work())
        work.ops += 1
        if name in _BATCHED and args[0].shape[-1] == 1 and args[1].dim() > 2:
            name = "aten::mul"  # an outer product, such as RoPE angles: no weight is read
        work.kernels += is_kernel(name)
        if name in _PRODUCTS:
            rows, weight = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            elements = weight.numel()
            if name == "aten::_grouped_mm":  # at most one expert is read per row
                elements = elements // weight.shape[0] * min(weight.shape[0], rows.shape[0])
            identity: object = id(weight)  # a prepacked weight is always the same object
            if weight.layout == torch.strided:  # all views of a weight have the same identity
                identity = weight.data_ptr(), weight.shape
            flops = 2 * result.numel() * rows.shape[-1]
            work.add_product(identity, elements, elements * weight.dtype.itemsize, flops)
        elif name.startswith(_ATTENTION):
            query, key, value = args[:3]  # scores and weighted sum: 2 FLOPs per multiply-add
            pairs = math.prod(query.shape[:-1]) * key.shape[-2]
            work.flops += 2 * pairs * (key.shape[-1] + value.shape[-1])
            work.cache_bytes += key.nbytes + value.nbytes
        return result


_BUFFER = 256 * 2**20  # bytes: larger than the caches
_MIN_READ = 64 * 2**10  # bytes: for a smaller sum the call would take longer than the reading
_READ = 32 * 2**20  # bytes read per timing; a smaller buffer is read repeatedly
_CALLS = 50  # per timing: so few that several timings fit into a time slice of the scheduler


@dataclass(frozen=True)
class MachineSpeeds:
    """``read_bandwidth``: bytes/s of a sum over a buffer larger than the caches. ``peak_flops``:
    FLOP/s of a product of many rows with a cached weight. ``product_seconds``: time of a call of a
    tiny product, the overhead of a call."""

    device: str
    dtype: str
    threads: int
    read_bandwidth: float
    peak_flops: float
    product_seconds: float


@torch.inference_mode()
def measure_machine(device: torch.device, dtype: torch.dtype) -> MachineSpeeds:
    """Measure the peak speeds; takes about 2 seconds."""
    side, rows = (4096, 4096) if device.type == "cuda" else (1024, 256)
    if device.type == "cpu" and not cpu_has_bf16():
        dtype = torch.float32  # without bf16 instructions torch emulates; our kernels use float32
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
    """Bytes/s of repeated sums over ``size`` bytes, which a cache serves if they fit into it."""
    data = torch.ones(max(_MIN_READ, size) // 4, device=device)
    times = max(1, _READ // (4 * data.numel()))
    return 4 * data.numel() / _seconds(data.sum, device, times)


def _product_seconds(
    side: int, rows: int, device: torch.device, dtype: torch.dtype, times: int
) -> float:
    linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype)
    x = torch.ones(rows, side, device=device, dtype=dtype)
    return _seconds(lambda: linear(x), device, times)


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Time of one call of ``times`` in a row: the best of several rounds, as noise only adds."""

    def repeat(_: int) -> None:
        for _ in range(times):
            run()

    return measure(repeat, [1], device).seconds[0] / times


MEMORY, COMPUTE, LAUNCH, PYTHON = "memory bandwidth", "compute", "kernel launches", "Python"
SATURATED = 0.5  # share of a peak speed from which that limit takes most of the time


@dataclass(frozen=True)
class Phase:
    """Time and ``work`` of one phase of a step, without the profiler's overhead.

    ``seconds`` is the sum of ``kernels`` (in matrix products and attention; on CUDA in any kernel),
    ``launches`` (in calling them, and in all other operators) and ``python`` (between operators).
    ``share``: of the step. ``bandwidth``, ``peak_flops``: the machine's peak bytes/s and FLOP/s."""

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
        """The limit that bounds the phase: memory or compute, whichever is nearer to its peak, if
        that is saturated or kernels take most of the time; else launches or Python, the longer."""
        if self.saturated or self.kernels > self.launches + self.python:
            return MEMORY if self.of_read_bandwidth >= self.of_peak_flops else COMPUTE
        return LAUNCH if self.launches >= self.python else PYTHON

    @property
    def label(self) -> str:
        """The bound as text; "nearest to" if it is memory or compute but not saturated."""
        near = self.bound in (MEMORY, COMPUTE) and not self.saturated
        return f"nearest to {self.bound}" if near else f"bound by {self.bound}"

    def explain(self) -> str:
        """What bounds this phase, with the figures that show it, and what would help."""
        limit = ""
        if self.bound == MEMORY:
            limit = f" ({self.of_read_bandwidth:.0%} of {rate(self.bandwidth)})"
        elif self.bound == COMPUTE:
            limit = f" ({self.of_peak_flops:.0%} of {self.peak_flops / 1e9:.3g} GFLOP/s)"
        parts = (self.kernels, self.launches, self.python)
        kernels, calls, python = (f"{_by(part, self.seconds):.0%}" for part in parts)
        helps = NOTES["profile"]["helps"][self.name][self.bound if self.saturated else "neither"]
        return (
            f"{self.name}: {1e3 * self.seconds:.3g} ms, {self.label}{limit}. Products and "
            f"attention take {kernels} of it, calling operators ({self.work.ops:.0f}) {calls}, "
            f"Python between them {python}. What helps: {helps}."
        )


def _by(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
