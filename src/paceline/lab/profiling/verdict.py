"""Which limit holds a phase of the step up, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.lab.profiling.machine import MachineSpeeds

# Moving the bytes at the machine's best takes as large a part of the time as the share of the best
# that was reached. From a half on, that part is larger than all others together.
SATURATED = 0.5
# A phase below this part of the step is not worth a sentence: without it the step would be no more
# than a twentieth faster.
MINOR = 0.05


class Bound(Enum):
    """What a phase waits for."""

    MEMORY = "memory bandwidth"
    COMPUTE = "compute"
    LAUNCH = "kernel launches"
    PYTHON = "Python"


@dataclass(frozen=True)
class Figures:
    """One phase in a step without the profiler. Seconds, bytes, FLOPs and calls a step.

    ``kernels + launches + python == seconds``: in products and attention, but for what the call of
    the smallest costs (on CUDA: in any kernel); in those calls and all other operators; and between
    operators. ``calls`` of operators, of them ``kernel_calls`` of products and attention.
    ``passes``: how often its ``parameters`` were read, each in ``weight_bits`` of memory, scales
    included. ``bandwidth``: what the machine reads at
    best from where these bytes lie.
    """

    name: str
    seconds: float
    kernels: float
    launches: float
    python: float
    calls: float = 0.0
    kernel_calls: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    parameters: int = 0
    passes: float = 0.0
    rows: float = 0.0
    bandwidth: float = 0.0
    weight_bits: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    def of_bandwidth(self) -> float:
        """Share of the machine's best reading, from 0 to about 1."""
        return self.bytes_per_second / self.bandwidth if self.bandwidth else 0.0

    def of_compute(self, machine: MachineSpeeds) -> float:
        return self.flops_per_second / machine.peak_flops


def bound(figures: Figures, machine: MachineSpeeds) -> Bound:
    """Memory or compute if one is saturated, or the nearer of them if products and attention take
    most of the time all the same; else calls or Python, whichever takes longer."""
    memory, compute = figures.of_bandwidth(), figures.of_compute(machine)
    nearer = Bound.MEMORY if memory >= compute else Bound.COMPUTE
    if saturated(figures, machine) or figures.kernels > figures.launches + figures.python:
        return nearer
    return Bound.LAUNCH if figures.launches >= figures.python else Bound.PYTHON


def saturated(figures: Figures, machine: MachineSpeeds) -> bool:
    """Whether memory or compute is used so well that nothing else can be the matter."""
    return max(figures.of_bandwidth(), figures.of_compute(machine)) >= SATURATED


def label(figures: Figures, machine: MachineSpeeds) -> str:
    """The bound in words; "nearest to" where products and attention do not reach their limit."""
    limit = bound(figures, machine)
    hardware = limit in (Bound.MEMORY, Bound.COMPUTE)
    near = "" if saturated(figures, machine) or not hardware else "nearest to "
    return f"{near}{limit.value}"


def explain(figures: Figures, machine: MachineSpeeds) -> str:
    """What holds this phase up, with the figures that say so, and what would help."""
    limit = bound(figures, machine)
    return (
        f"{_TITLES[figures.name]}: {milliseconds(figures.seconds)}, {_bound_by(figures, machine)}. "
        f"{_reason(limit, figures, machine)} What helps: {_cure(limit, figures, machine)}."
    )


def _bound_by(figures: Figures, machine: MachineSpeeds) -> str:
    words = label(figures, machine)
    return words if words.startswith("nearest") else f"bound by {words}"


def _reason(limit: Bound, figures: Figures, machine: MachineSpeeds) -> str:
    if limit is Bound.PYTHON:
        return (
            f"{_percent(figures.python, figures.seconds)} of it passes between its "
            f"{figures.calls:.0f} operators{_passes(figures)}, "
            f"{_percent(figures.launches, figures.seconds)} in calling them; products and "
            f"attention themselves get {_percent(figures.kernels, figures.seconds)}."
        )
    if limit is Bound.LAUNCH:
        return (
            f"Calling its {figures.calls:.0f} operators{_passes(figures)} takes "
            f"{_percent(figures.launches, figures.seconds)} of it, Python between them "
            f"{_percent(figures.python, figures.seconds)}, products and attention themselves "
            f"{_percent(figures.kernels, figures.seconds)}. Whatever they compute, each of the "
            f"{figures.kernel_calls:.0f} products and attentions costs "
            f"{1e6 * machine.product_seconds:.1f} µs at least, any other operator "
            f"{1e6 * machine.op_seconds:.1f} µs."
        )
    if limit is Bound.MEMORY:
        sentences = (
            f"It moves {size(figures.bytes)}{_passes(figures)} at "
            f"{rate(figures.bytes_per_second)}: "
            f"{_percent(figures.bytes_per_second, machine.copy_bandwidth)} of the copy bandwidth, "
            f"{figures.of_bandwidth():.0%} of what this machine reads at best "
            f"({rate(figures.bandwidth)})."
        )
    else:
        sentences = (
            f"Its {figures.flops / 1e9:.3g} GFLOP, in products of {rows_of(figures.rows)}, run at "
            f"{figures.flops_per_second / 1e9:.3g} GFLOP/s, {figures.of_compute(machine):.0%} of "
            f"the best ({machine.peak_flops / 1e9:.3g})."
        )
    if not saturated(figures, machine):
        sentences += (
            f" Products and attention take {_percent(figures.kernels, figures.seconds)} of the "
            "time, but do not reach full speed: shapes are small, or the machine is busy."
        )
    return sentences


def _passes(figures: Figures) -> str:
    if figures.passes < 1.05:
        return ""
    return f" in {figures.passes:.1f} passes over {figures.parameters / 1e6:.3g} M parameters"


def rows_of(count: float) -> str:
    return f"{count:.0f} row{'' if round(count) == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def size(count: float) -> str:
    """Bytes, by powers of 1000 as bandwidths are."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.0%}"


_TITLES = {
    "draft": "Draft",
    "target": "Target forward",
    "verify": "Verify",
    "other": "Scheduling, batching and committing",
}
_FEWER_STEPS = "fewer steps (longer drafts) or more sequences in each"
_MORE_TOKENS = "more tokens in each forward (longer drafts, more sequences), which cost little here"
_FEWER_PASSES = (
    "fewer passes (shorter drafts, heads that draft several tokens at once), or a draft that takes "
    "no forward (ngram)"
)
_FEWER_ROWS = "fewer rows of logits (shorter drafts, smaller trees)"
# Where memory or compute is saturated; where it is not, what saves calls and Python helps.
_CURES = {
    (Bound.MEMORY, "target"): "fewer bytes (a smaller dtype or quantised weights), or more tokens "
    "for the same bytes (longer drafts, more sequences)",
    (Bound.MEMORY, "draft"): f"a smaller draft, {_FEWER_PASSES}",
    (Bound.MEMORY, "verify"): f"{_FEWER_ROWS}, or greedy decoding",
    (Bound.MEMORY, "other"): "fewer rows to move (chains instead of trees)",
    (Bound.COMPUTE, "target"): "fewer rows (shorter drafts, smaller trees, fewer sequences): each "
    "takes its time here",
    (Bound.COMPUTE, "draft"): "a smaller draft, or shorter drafts",
    (Bound.COMPUTE, "verify"): _FEWER_ROWS,
}
_OVERHEAD_CURES = {"target": _MORE_TOKENS, "draft": _FEWER_PASSES}


def _cure(limit: Bound, figures: Figures, machine: MachineSpeeds) -> str:
    if saturated(figures, machine):
        return _CURES.get((limit, figures.name), _FEWER_STEPS)
    return _OVERHEAD_CURES.get(figures.name, _FEWER_STEPS)


def conclude(
    name: str, phases: list[Figures], machine: MachineSpeeds, tokens_per_second: float
) -> str:
    """One sentence on the whole step: what holds most of its time up."""
    total = sum(figures.seconds for figures in phases)
    parts: dict[str, float] = {}
    for figures in phases:
        words = _bound_by(figures, machine)
        parts[words] = parts.get(words, 0.0) + figures.seconds
    first = max(parts, key=lambda part: parts[part])
    return (
        f"{name}: a step takes {milliseconds(total)} ({tokens_per_second:.0f} tokens/s); "
        f"{_percent(parts[first], total)} of it is {first}."
    )
