"""The cost model of a step, and the search through all settings with it. Pure numbers.

A draft of g levels is expected to yield E(g) = 1 + s_1 + ... + s_g tokens a step, s_i being the
measured share of steps whose level i was accepted (Leviathan et al. 2023, equation 1, with a
measured rate for every level in the place of one rate). The step takes the drafter's passes, a
target forward over 1 + n(g) tokens of each sequence, and what surrounds them. All are measured;
see measure.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.core.costs import CostCurve

MARGIN = 1.02  # what must be gained before anything but the simplest is taken


@dataclass(frozen=True)
class TargetCosts:
    """Seconds of a target forward by batch size and tokens per sequence, linear in between."""

    batches: tuple[int, ...]
    curves: tuple[CostCurve, ...]

    def __call__(self, batch: float, tokens_each: float) -> float:
        """Beyond the largest batch the last slope goes on."""
        if len(self.batches) == 1:
            return self.curves[0](tokens_each) * batch / self.batches[0]
        right = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        x0, x1 = self.batches[right - 1], self.batches[right]
        y0, y1 = self.curves[right - 1](tokens_each), self.curves[right](tokens_each)
        return max(y0 + (y1 - y0) * (batch - x0) / (x1 - x0), 1e-9)


@dataclass(frozen=True)
class MeasuredMethod:
    """One drafter as it was measured; entries of lists by draft length begin with length 0.

    ``survival[i]``: share of steps in which level i + 1 was accepted. ``acceptance[i]`` is
    conditional, of the ``reached[i]`` drafts that were tried at that position. ``nodes``: verified
    per sequence. ``passes``: forwards of the drafter. Curves are by batch size:
    ``pass_seconds`` of one pass as it takes in real steps, ``handling`` of drafting besides
    passes, ``dearness`` of real target forwards by those measured alone, ``overhead`` of a step
    besides drafting and target, and ``node_overhead`` of each node verified per sequence.
    """

    label: str
    spec: str
    family: str
    shape: str  # "chain", a kind of tree or, for plain decoding, ""
    survival: tuple[float, ...]
    acceptance: tuple[float, ...]
    reached: tuple[int, ...]
    nodes: tuple[float, ...]
    passes: tuple[int, ...]
    pass_seconds: CostCurve
    handling: CostCurve
    dearness: CostCurve
    overhead: CostCurve
    node_overhead: CostCurve
    parameters: int = 0  # of a draft model

    @property
    def longest(self) -> int:
        return len(self.nodes) - 1

    @property
    def lookup(self) -> bool:
        """Whether drafting takes no forward."""
        return not any(self.passes)

    @property
    def mean_acceptance(self) -> float:
        """Of all positions that were tried, the share that was accepted."""
        tried = sum(self.reached)
        won = sum(rate * count for rate, count in zip(self.acceptance, self.reached, strict=True))
        return won / tried if tried else 0.0

    def expected_tokens(self, length: int) -> float:
        """Tokens a step, the target's own included."""
        return list(accumulate(self.survival[:length], initial=1.0))[-1]


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step of a whole batch, by what takes them."""

    draft: float
    target: float
    other: float

    @property
    def total(self) -> float:
        return self.draft + self.target + self.other


def step_cost(method: MeasuredMethod, target: TargetCosts, length: int, batch: float) -> StepCost:
    """Of ``batch`` sequences that are each drafted ``length`` levels for."""
    nodes = method.nodes[length]
    drafting = method.passes[length] * method.pass_seconds(batch) + method.handling(batch)
    return StepCost(
        draft=drafting if length else 0.0,
        target=target(batch, 1 + nodes) * method.dearness(batch),
        other=method.overhead(batch) + nodes * method.node_overhead(batch),
    )


@dataclass(frozen=True)
class PredictedSetting:
    """A method at a draft length and batch size, with what the model predicts for it."""

    method: MeasuredMethod
    length: int
    batch: int
    tokens_per_step: float  # per sequence
    cost: StepCost

    @property
    def rate(self) -> float:
        """Tokens per second of the whole batch."""
        return self.batch * self.tokens_per_step / self.cost.total


def predict(
    method: MeasuredMethod, target: TargetCosts, length: int, batch: int
) -> PredictedSetting:
    cost = step_cost(method, target, length, batch)
    return PredictedSetting(method, length, batch, method.expected_tokens(length), cost)


def best_length(method: MeasuredMethod, target: TargetCosts, batch: int) -> PredictedSetting:
    """The draft length, 1 at least where there is one, with the most tokens per second."""
    lengths = range(min(1, method.longest), method.longest + 1)
    return max((predict(method, target, g, batch) for g in lengths), key=lambda s: s.rate)


def search(
    methods: Iterable[MeasuredMethod], target: TargetCosts, batch: int
) -> list[PredictedSetting]:
    """The best setting of every method at one batch size, the fastest first.

    There are some hundred settings, so all are tried.
    """
    found = [best_length(method, target, batch) for method in methods]
    return sorted(found, key=lambda setting: setting.rate, reverse=True)


def batch_sizes(concurrency: int, largest: int = 32) -> list[int]:
    """1, 2, 4 ... up to ``largest`` and to the concurrency, which is one of them."""
    powers = [1 << n for n in range(16) if 1 << n <= max(concurrency, largest)]
    return sorted({*powers, concurrency})


def best_batch(method: MeasuredMethod, target: TargetCosts, concurrency: int) -> PredictedSetting:
    """How many of ``concurrency`` requests to decode at once.

    The smallest batch within the margin of the most tokens per second: requests that wait must
    gain more from it than that.
    """
    options = [
        best_length(method, target, batch)
        for batch in batch_sizes(concurrency, largest=concurrency)
    ]
    most = max(setting.rate for setting in options)
    whole = options[-1]
    if whole.rate * MARGIN >= most:
        return whole
    return next(setting for setting in options if setting.rate * MARGIN >= most)


def speedups(
    method: MeasuredMethod, plain: MeasuredMethod, target: TargetCosts, batches: Sequence[int]
) -> list[float]:
    """Predicted tokens per second by plain decoding's at each batch size, each at its best."""
    return [
        best_length(method, target, batch).rate / predict(plain, target, 0, batch).rate
        for batch in batches
    ]


def break_even(
    method: MeasuredMethod, plain: MeasuredMethod, target: TargetCosts, largest: int
) -> int:
    """The largest batch up to which the method beats plain decoding without a gap; 0 if none."""
    for batch in range(1, largest + 1):
        if speedups(method, plain, target, [batch])[0] <= 1:
            return batch - 1
    return largest
