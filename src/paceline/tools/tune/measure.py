"""Measuring, once, all that the search needs: cost curves, acceptance, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from paceline.budget import Budget
from paceline.core.costs import CostCurve
from paceline.core.params import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.driver import StepSums
from paceline.errors import DataError
from paceline.model.identity import count_parameters
from paceline.model.target import CausalModel
from paceline.pace.costs import made_up_chains, measure
from paceline.pace.worth import Profile
from paceline.tools.tune.candidates import DrafterCandidate
from paceline.tools.tune.decode import MeasuredStep, Run, decode
from paceline.tools.tune.search import MeasuredMethod, TargetCosts

if TYPE_CHECKING:
    from paceline.llm import LLM

LONGEST = 12  # levels tried where a level takes a pass; twice as many where it takes none
_SHORT = 2  # levels of short drafts, from which the cost of a draft besides its passes follows
_BRIEF = 24  # tokens of answers that only time is taken of
_CONTEXT = 64  # cached tokens of the sequences that forwards are measured on
_TOKENS = (1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 25)  # per sequence
_FEW_TOKENS = (1, 2, 4, 7, 13, 25)  # where time is short
_HURRIED = 2  # rounds then
_FAR = 1 << 20  # a ratio measured up to some batch holds beyond it


@dataclass(frozen=True)
class Sample:
    """What drafters are measured on. ``batches``: one sequence, and many."""

    alone: list[list[int]]
    together: list[list[int]]
    batches: tuple[int, int]
    max_tokens: int
    temperature: float

    def params(self, length: int | None = None) -> SamplingParams:
        """Greedy, or sampled as users mostly do: without a seed."""
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, draft_length=length
        )

    def brief(self) -> Sample:
        """Fewer and shorter answers."""
        return replace(
            self,
            together=self.together[: self.batches[1]],
            max_tokens=min(self.max_tokens, _BRIEF),
        )


@torch.inference_mode()
def target_costs(
    llm: LLM,
    batches: Sequence[int],
    budget: Budget | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> TargetCosts:
    """Target forwards over chains of each length after a short context, for each batch size.

    ``llm`` is one of plain decoding, idle, with room for the largest batch; batches for which its
    cache has no room are left out, and large ones that do not fit into the budget.
    """
    budget = budget or Budget()
    hurried = budget.seconds is not None
    target, cache = llm.target, llm.engine.cache
    context = max(1, min(_CONTEXT, target.max_positions // 2))
    wanted = _FEW_TOKENS if hurried else _TOKENS
    rounds: dict[str, Any] = {"rounds": _HURRIED, "budget": 0.0} if hurried else {}
    counts = [n for n in wanted if context + n <= target.max_positions]
    reach = context + counts[-1]
    blocks_each = -(-reach // cache.block_size)
    sizes = [b for b in batches if b * blocks_each <= cache.num_blocks] or [1]
    curves: list[CostCurve] = []
    with made_up_chains(target, cache, max(sizes), context, counts[-1]) as run:
        for size in sizes:
            if curves and not budget.fits("rows", size):
                break
            advance(f"measuring the target: {size} at once")
            with budget.piece("rows", size):
                curve = measure(partial(run, size), counts, target.device, **rounds)
            curves.append(curve)
    return TargetCosts(tuple(sizes[: len(curves)]), tuple(curves))


def measure_plain(
    llm: LLM, target: TargetCosts, sample: Sample
) -> tuple[MeasuredMethod, list[Run]]:
    """Plain decoding as a method without drafts, and its runs. Raises DataError."""
    runs = _runs(llm, sample, 0)
    costs = _typical_pair(runs, target)
    none = CostCurve((1,), (0.0,))
    method = MeasuredMethod(
        label="plain",
        spec="none",
        family="none",
        shape="",
        survival=(),
        acceptance=(),
        reached=(),
        nodes=(0.0,),
        passes=(0,),
        pass_seconds=none,
        handling=none,
        dearness=_ratio(sample.batches, [c.target / target(c.batch, 1) for c in costs]),
        overhead=CostCurve(sample.batches, tuple(c.other for c in costs)),
        node_overhead=none,
    )
    return method, runs


def measure_method(
    llm: LLM,
    candidate: DrafterCandidate,
    target: TargetCosts,
    plain: MeasuredMethod,
    sample: Sample,
) -> MeasuredMethod:
    """A drafter's acceptance and costs. ``llm`` has it loaded and is idle. Raises DataError."""
    drafter = llm.engine.drafter
    rehearsed = measure(drafter.rehearse, list(target.batches), llm.target.device)
    profile = Profile.of(drafter, LONGEST, rehearsed)
    # A draft must have room in the answers, or nothing is learnt of it.
    longest = max(1, min(profile.longest, sample.max_tokens // 3))
    runs = _runs(llm, sample, longest)
    levels = sum((run.levels for run in runs), StepSums())
    fill = levels.drafted / max(1, levels.sequences * profile.nodes[longest])
    nodes = tuple(fill * most for most in profile.nodes)
    deepest = max(1, len(levels.reached))  # others never drafted so far
    long = _typical_pair(runs, target)
    short = long
    if profile.passes[longest] > profile.passes[min(_SHORT, longest)]:
        short = _typical_pair(_runs(llm, sample.brief(), _SHORT), target)
    drift = _drift(llm, sample, target, plain)
    return MeasuredMethod(
        label=candidate.label,
        spec=candidate.spec,
        family=candidate.family,
        shape=candidate.shape,
        survival=tuple(won / levels.sequences for won in levels.accepted_at),
        acceptance=levels.rates,
        reached=levels.reached,
        nodes=nodes[: deepest + 1],
        passes=profile.passes[: deepest + 1],
        **_drafting(
            [_scaled(c, 1 / drift) for c in long],
            [_scaled(c, 1 / drift) for c in short],
            (profile.passes[longest], profile.passes[min(_SHORT, longest)]),
            rehearsed,
            sample.batches,
        ),
        **_surroundings([_scaled(c, 1 / drift) for c in long], target, plain, sample.batches),
        overhead=plain.overhead,
        parameters=_parameters(drafter),
    )


def _drift(llm: LLM, sample: Sample, target: TargetCosts, plain: MeasuredMethod) -> float:
    """How much slower plain steps are than when plain decoding was measured.

    A machine's clock drifts, and other programs come and go: what is measured at another time is
    compared by plain steps beside it.
    """
    run = decode(llm, sample.alone[:2], 1, sample.brief().params(0))
    now = _typical(run.steps, 1, target)
    if now is None:
        return 1.0
    return min(max(now.target / (target(1, 1) * plain.dearness(1)), 0.5), 3.0)


def _scaled(step: MeasuredStep, factor: float) -> MeasuredStep:
    return replace(
        step, draft=step.draft * factor, target=step.target * factor, other=step.other * factor
    )


def _drafting(
    long: Sequence[MeasuredStep],
    short: Sequence[MeasuredStep],
    passes: tuple[int, int],
    rehearsed: CostCurve,
    batches: tuple[int, int],
) -> dict[str, CostCurve]:
    """What drafting takes for each pass and besides, from long and short drafts in real steps."""
    each, besides = [], []
    for many, few in zip(long, short, strict=True):
        slope = many.draft / passes[0] if passes[0] else 0.0
        if passes[0] > passes[1]:
            slope = min(max((many.draft - few.draft) / (passes[0] - passes[1]), 0.0), slope)
        each.append(slope)
        besides.append(max(0.0, few.draft - passes[1] * slope))
    if not passes[0]:
        return {"pass_seconds": rehearsed, "handling": CostCurve(batches, tuple(besides))}
    alone = [seconds / rehearsed(c.batch) for seconds, c in zip(each, long, strict=True)]
    dearer, points = _ratio(batches, alone), rehearsed.tokens
    return {
        "pass_seconds": CostCurve(points, tuple(rehearsed(b) * dearer(b) for b in points)),
        "handling": CostCurve(batches, tuple(besides)),
    }


def _surroundings(
    costs: Sequence[MeasuredStep],
    target: TargetCosts,
    plain: MeasuredMethod,
    batches: tuple[int, int],
) -> dict[str, CostCurve]:
    """How real target forwards differ from those measured alone, and what each node adds."""
    nodes = [max(1.0, c.nodes / c.batch) for c in costs]
    dearer = [c.target / target(c.batch, 1 + c.nodes / c.batch) for c in costs]
    extra = [
        max(0.0, c.other - plain.overhead(c.batch)) / n for c, n in zip(costs, nodes, strict=True)
    ]
    return {
        "dearness": _ratio(batches, dearer),
        "node_overhead": CostCurve(batches, tuple(extra)),
    }


def _runs(llm: LLM, sample: Sample, length: int) -> list[Run]:
    """One sequence at a time, and many together."""
    params = sample.params(length)
    return [
        decode(llm, prompts, batch, params, length)
        for prompts, batch in zip((sample.alone, sample.together), sample.batches, strict=True)
    ]


def _typical_pair(runs: Sequence[Run], target: TargetCosts) -> list[MeasuredStep]:
    """Typical steps of both runs; one stands for the other if that never had a full batch."""
    steps = [_typical(run.steps, run.concurrency, target) for run in runs]
    found = next((step for step in steps if step is not None), None)
    if found is None:
        raise DataError(
            "the answers are too short to measure decoding on; give other prompts or a larger "
            "--max-tokens"
        )
    return [step or found for step in steps]


def _typical(steps: Sequence[MeasuredStep], batch: int, target: TargetCosts) -> MeasuredStep | None:
    """The mean of the faster three quarters of the steps of a full batch: noise only adds.

    Fast is judged by the target forward against what it should take, so that steps which verify
    little are not preferred.
    """
    chosen = [step for step in steps if step.batch == batch]
    chosen = [step for step in chosen if step.full] or chosen
    chosen.sort(key=lambda step: step.target / target(step.batch, 1 + step.nodes / step.batch))
    kept = chosen[: -(-3 * len(chosen) // 4)]
    if not kept:
        return None
    return MeasuredStep(
        batch=batch,
        nodes=round(fmean(step.nodes for step in kept)),
        tokens=0,
        draft=fmean(step.draft for step in kept),
        target=fmean(step.target for step in kept),
        other=fmean(step.other for step in kept),
        full=True,
    )


def _ratio(batches: tuple[int, int], values: Sequence[float]) -> CostCurve:
    """A factor that stays as it was beyond the larger batch."""
    one, many = values
    return CostCurve((*batches, _FAR), (one, many, many))


def _parameters(drafter: Drafter) -> int:
    """Of a draft model; heads borrow too much of the target to compare."""
    model = getattr(drafter, "model", None)
    return count_parameters(model) if isinstance(model, CausalModel) else 0
