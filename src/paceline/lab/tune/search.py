"""Which drafters are tried, what was measured of them, and what the engine's cost model predicts of
their settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.drafters import DRAFTERS, DraftSpec, Hybrid, parse_draft
from paceline.engine.driver import StepSums
from paceline.errors import ConfigError
from paceline.model.names import DEFAULT_DRAFT, EMBEDDED, MADE_FOR, has_assets


@dataclass(frozen=True)
class DrafterCandidate:
    """``requested``: the user named it, so it must load. ``default``: commands take it where no
    draft is named, so it is confirmed, not predicted."""

    label: str
    spec: str
    family: str
    requested: bool = False
    default: bool = False


def at_hand(model: str, drafts: Sequence[str], only: bool = False) -> list[DrafterCandidate]:
    """The user's drafts (if none, those built in for the target) with their tree variants, then
    drafters that need no training, the cheapest first, and the default draft. ``only``: nothing but
    the user's. Raises ConfigError on a spec that cannot be read."""
    requested = [variant for text in drafts for variant in variants(text, requested=True)]
    if only:
        if not requested:
            raise ConfigError("--only tries nothing but --draft, which names no drafter; add one")
        return _unique(requested)
    texts: list[str] = []
    if not drafts and model in MADE_FOR:
        # Kinds that share weights are variants of the first of them.
        records = reversed([*DRAFTERS.values()])
        first = {record.weights: record.kind for record in records if record.weights}
        made = [(kind, f"{model}-{weights}") for weights, kind in first.items()]
        texts += [f"{kind}:{name}" for kind, name in made if has_assets(name)]
    unasked = ("always",) if model == EMBEDDED else ("always", "real")
    texts += [kind for kind in DRAFTERS if DRAFTERS[kind].tried in unasked]
    candidates = [*requested, *(variant for text in texts for variant in variants(text))]
    return [*_unique(sorted(candidates, key=_dearness)), default_candidate(DEFAULT_DRAFT)]


def _dearness(candidate: DrafterCandidate) -> tuple[bool, bool]:
    """The user's come first, then those that only look up, then those that run a model."""
    record, unasked = DRAFTERS[candidate.family], not candidate.requested
    return unasked and not record.looks_up, unasked and record.tried != "always"


def default_candidate(text: str) -> DrafterCandidate:
    """What commands take: "auto", and once the target is loaded what that is composed of."""
    spec = parse_draft(text)
    label = " + ".join(map(_label, spec.members())) + " (default)"
    return DrafterCandidate(label, str(spec), spec.kind, default=True)


def variants(text: str, requested: bool = False) -> list[DrafterCandidate]:
    """A draft with the shapes of trees and the precisions that are tried for it. Nobody asked for
    the precisions, so one that cannot be had here is left out."""
    spec = parse_draft(text)
    label = _label(spec)
    tried = [
        (label if variant is spec else f"{label} {shape}", variant, requested)
        for shape, variant in spec.variants().items()
    ]
    for name, one in spec.precisions().items():
        same = one.argument() == spec.argument()
        tried.append((f"{label} {name}" if same else _label(one), one, False))
    return [DrafterCandidate(name, str(v), v.kind, asked) for name, v, asked in tried]


def _label(spec: DraftSpec) -> str:
    """The last part of its path, or its kind and what that is of; with its options."""
    argument = (spec.argument() or "").rstrip("/")
    _, slash, name = argument.rpartition("/")
    if not slash:
        name = f"{spec.kind}:{argument}" if argument else spec.kind
    return " ".join([name, *(f"{key}={value}" for key, value in spec.changed_options().items())])


def hybrid_of(first: DrafterCandidate, second: DrafterCandidate) -> DrafterCandidate:
    """Two drafters that take turns; the one that looks text up comes first."""
    label = f"{first.label} + {second.label}"
    return DrafterCandidate(label, f"{Hybrid.kind}:{first.spec}+{second.spec}", Hybrid.kind)


def _unique(candidates: Iterable[DrafterCandidate]) -> list[DrafterCandidate]:
    return list({candidate.spec: candidate for candidate in candidates}.values())


MARGIN = 1.02  # what must be gained before anything but the simplest is taken
_NO_PASSES = DrafterCosts((0.0,), (0,), CostCurve((1,), (0.0,)))
_REPEATED = 80  # times that the cost model is shown a typical step


@dataclass(frozen=True)
class MeasuredMethod(DrafterCandidate):
    """One drafter as it was measured, or plain decoding. ``levels``: how drafts fared. ``costs``:
    nodes a sequence (as many as were proposed), passes, and the seconds of one pass by batch size.
    ``steps``: typical ones, by the length of their drafts."""

    levels: StepSums = field(default_factory=StepSums)
    costs: DrafterCosts = _NO_PASSES
    steps: tuple[tuple[int, StepSums], ...] = ()

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
        tokens, seconds = 1 + sum(self.survival[:length]), batch * cost.table(name, batch)[length]
        drafting = cost.drafting(batch, {name: cost.passes(name, [length] * batch)})
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
    """What steps with a method take; it is known by its spec."""
    name, cost = method.spec, CostModel(target, {method.spec: method.costs})
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


def batch_sizes(concurrency: int, largest: int) -> list[int]:
    """1, 2, 4 ... up to ``largest`` and to the concurrency, which is one of them."""
    powers = [1 << n for n in range(16) if 1 << n <= max(concurrency, largest)]
    return sorted({*powers, concurrency})
