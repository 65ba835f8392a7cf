"""A phase of the step: its figures, which limit holds it up, and that in words."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.lab.profiling.work import Work

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
