"""What was measured of a drafter, and what the engine's cost model predicts of its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.engine.driver import StepSums
from paceline.lab.tune.candidates import DrafterCandidate

MARGIN = 1.02  # what must be gained before anything but the simplest is taken
_NO_PASSES = DrafterCosts((0.0,), (0,), CostCurve((1,), (0.0,)))
_REPEATED = 80  # times that the cost model is shown a typical step


@dataclass(frozen=True)
class MeasuredMethod(DrafterCandidate):
    """One drafter as it was measured, or plain decoding. ``levels``: how drafts fared. ``costs``:
    nodes a sequence (as many as were proposed), passes, and the seconds of one pass by batch size.
    ``steps``: typical ones, by the length of their drafts. ``parameters``: of a draft model."""

    levels: StepSums = field(default_factory=StepSums)
    costs: DrafterCosts = _NO_PASSES
    steps: tuple[tuple[int, StepSums], ...] = ()
    parameters: int = 0

    def __hash__(self) -> int:
        return hash(self.spec)

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of steps in which level 1, 2, ... was accepted."""
        return tuple(count / self.levels.sequences for count in self.levels.accepted_at)

    def pass_ratio(self, target: TargetCosts) -> float:
        """Seconds of one pass of the drafter by those of a plain step, both of one sequence."""
        cost = cost_of(self, target)
        alone = cost.passes(self.spec, [1]) / max(1, self.costs.passes[1])
        return cost.drafting(1, {self.spec: alone}) / cost.rest(1)

    def predict(self, target: TargetCosts, length: int, batch: int) -> PredictedSetting:
        """If all sequences draft so many levels; 0 is plain decoding."""
        cost, name = cost_of(self, target), self.spec
        tokens, seconds = cost.tokens(name, length), batch * cost.table(name, batch)[length]
        drafting = seconds - cost.rest(batch, self.costs.nodes[length])
        rate = batch * tokens / seconds
        speedup = rate * cost.rest(batch) / batch
        return PredictedSetting(self, length, batch, tokens, seconds, drafting, rate, speedup)

    def best_length(self, target: TargetCosts, batch: int) -> PredictedSetting:
        """The draft length, 1 at least, with the most tokens per second."""
        lengths = range(1, self.costs.longest + 1)
        settings = (self.predict(target, length, batch) for length in lengths)
        return max(settings, key=lambda setting: setting.rate)

    def break_even(self, target: TargetCosts, largest: int) -> int:
        """The largest batch up to which it beats plain decoding without a gap; 0 if none."""
        for batch in range(1, largest + 1):
            if self.best_length(target, batch).speedup <= 1:
                return batch - 1
        return largest


@lru_cache(maxsize=256)
def cost_of(method: MeasuredMethod, target: TargetCosts) -> CostModel:
    """What steps with a method take and gain; it is known by its spec."""
    name, cost = method.spec, CostModel(target, {method.spec: method.costs})
    chances = (1.0, *method.survival)
    rates = [after / before if before else 0.0 for before, after in pairwise(chances)]
    cost.acceptance.everyone(name).know(rates)
    for length, step in method.steps * _REPEATED:
        batch, seconds = step.sequences // step.steps, step.whole / step.steps
        if length:
            passes = cost.passes(name, [length] * batch)
            nodes, drafting = step.drafted / step.sequences, step.mean_seconds("draft")
            cost.learn_drafts(batch, nodes, seconds, drafting, {name: passes})
        else:
            cost.learn_plain(batch, seconds)
    return cost


@dataclass(frozen=True)
class PredictedSetting:
    """What the model predicts of a method. ``tokens_per_step``: of a sequence; ``seconds``: of a
    step of the whole batch, ``drafting`` of them to draft; ``rate``: tokens per second of the whole
    batch; ``speedup``: by plain decoding's."""

    method: MeasuredMethod
    length: int
    batch: int
    tokens_per_step: float
    seconds: float
    drafting: float
    rate: float
    speedup: float


def predicted_by_measured(predicted: float, measured: float) -> float:
    """How many times what was measured was predicted; 1.1 promises 10 % too much."""
    return predicted / measured if measured else 0.0


def batch_sizes(concurrency: int, largest: int) -> list[int]:
    """1, 2, 4 ... up to ``largest`` and to the concurrency, which is one of them."""
    powers = [1 << n for n in range(16) if 1 << n <= max(concurrency, largest)]
    return sorted({*powers, concurrency})
