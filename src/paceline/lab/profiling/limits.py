"""What this machine can do at best, which limit holds a phase of the step up, and that in words.

The bytes that a step must move and the FLOPs it does are counted operator by operator: a weight
each time that a product reads it, keys and values as far as attention reads them."""

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

# Position of the rows among the arguments; the weight comes behind them.
_PRODUCTS = dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::matmul", "aten::linear"), 0)
_PRODUCTS |= {"aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0}
_PRODUCTS |= {"aten::addmm": 1, "aten::baddbmm": 1}
_BATCHED = frozenset({"aten::bmm", "aten::matmul"})
_ATTENTION = ("aten::scaled_dot_product_", "aten::_scaled_dot_product_")


def is_kernel(name: str) -> bool:
    """Whether an operator is a product or an attention: where the work of a model is."""
    return name in _PRODUCTS or name.startswith((OPERATOR, *_ATTENTION, "aten::einsum"))


@dataclass
class Work:
    """What one phase did. ``kernels``: products and attention among the ``ops``. ``weight_bytes``:
    of weights whenever they are read; ``weights``: elements and bytes of the distinct ones.
    ``cache_bytes``: of keys and values."""

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
    def distinct_bytes(self) -> int:
        return sum(size for _, size in self.weights.values())

    @property
    def weight_bits(self) -> float:
        """Of a number of the weights as it is read, scales included."""
        return 8 * self.distinct_bytes / self.parameters if self.weights else 0.0

    def per_step(self, steps: int) -> Work:
        """Of one of so many steps."""
        sums = {name: value / steps for name, value in vars(self).items() if name != "weights"}
        return Work(**sums, weights=self.weights)

    def add_product(self, key: object, elements: int, size: int, flops: int) -> None:
        """A product with a weight of ``size`` bytes."""
        self.flops += flops
        self.weight_bytes += size
        self.weights[key] = (elements, size)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the work of operators called in ``phase("step")`` to its innermost phase, or "other"."""

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
        """A call of our own kernels, which is one operator."""
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
        if name == "aten::einsum":  # its products are seen one by one
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        work = self.phases.setdefault(self._phase, Work())
        work.ops += 1
        if name in _BATCHED and args[0].shape[-1] == 1 and args[1].dim() > 2:
            name = "aten::mul"  # outer products, such as angles of rope: no weight, and no sum
        work.kernels += is_kernel(name)
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            _count_product(work, name, args[first], args[first + 1], result)
        elif name.startswith(_ATTENTION):
            query, key, value = args[:3]  # scores and weighted sum, two FLOPs a multiplication
            pairs = math.prod(query.shape[:-1]) * key.shape[-2]
            work.flops += 2 * pairs * (key.shape[-1] + value.shape[-1])
            work.cache_bytes += key.nbytes + value.nbytes
        return result


def _count_product(
    work: Work, name: str, rows: torch.Tensor, weight: torch.Tensor, result: torch.Tensor
) -> None:
    elements = weight.numel()
    if name == "aten::_grouped_mm":  # at most one expert for each row is read
        elements = elements // weight.shape[0] * min(weight.shape[0], rows.shape[0])
    key: object = id(weight)  # of a prepacked one, which stays one object
    if weight.layout == torch.strided:  # the same for every view of a weight
        key = weight.data_ptr(), weight.shape
    flops = 2 * result.numel() * rows.shape[-1]
    work.add_product(key, elements, elements * weight.dtype.itemsize, flops)


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
