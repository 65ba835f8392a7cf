"""Measuring, once, all that the search needs: cost curves, acceptance, and what surrounds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from paceline.core.costs import CostCurve
from paceline.core.params import SamplingParams
from paceline.core.tree import chain_parents
from paceline.draft.base import Drafter
from paceline.draft.worth import Profile
from paceline.engine.costs import measure
from paceline.model.cache import Feed
from paceline.model.identity import count_parameters
from paceline.model.target import CausalModel
from paceline.tune.candidates import Candidate
from paceline.tune.decode import Levels, Run, Step, decode
from paceline.tune.search import Method, TargetCosts

if TYPE_CHECKING:
    from paceline.llm import LLM

LONGEST = 12  # levels tried where a level takes a pass; twice as many where it takes none
_CONTEXT = 64  # cached tokens of the sequences that forwards are measured on
_TOKENS = (1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 25)  # per sequence
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


@torch.inference_mode()
def target_costs(llm: LLM, batches: Sequence[int]) -> TargetCosts:
    """Target forwards over chains of each length after a short context, for each batch size.

    ``llm`` is one of plain decoding, idle, with room for the largest batch; batches for which its
    cache has no room are left out.
    """
    target, cache = llm.target, llm.engine.cache
    context = max(1, min(_CONTEXT, target.max_positions // 2))
    counts = [n for n in _TOKENS if context + n <= target.max_positions]
    reach = context + counts[-1]
    blocks_each = -(-reach // cache.block_size)
    sizes = [b for b in batches if b * blocks_each <= cache.num_blocks] or [1]
    ids = range(-max(sizes), 0)
    tokens = torch.zeros(counts[-1], dtype=torch.int64, device=target.device)

    def curve(sequences: int) -> CostCurve:
        def run(count: int) -> None:
            chain, drafted = chain_parents(count - 1), tokens[: count - 1] if count > 1 else None
            feeds = [Feed(i, context, (0,), chain, drafted) for i in ids[:sequences]]
            target(cache.pack(feeds), cache).logits.argmax(-1)

        return measure(run, counts, target.device)

    for seq_id in ids:
        cache.admit(seq_id, [0])
        cache.reserve(seq_id, reach)
    try:
        return TargetCosts(tuple(sizes), tuple(curve(size) for size in sizes))
    finally:
        for seq_id in ids:
            cache.free(seq_id)


def measure_plain(llm: LLM, target: TargetCosts, sample: Sample) -> tuple[Method, list[Run]]:
    """Plain decoding as a method without drafts, and its runs."""
    runs = _runs(llm, sample, 0)
    costs = [
        _typical(run.steps, batch, target) for run, batch in zip(runs, sample.batches, strict=True)
    ]
    none = CostCurve((1,), (0.0,))
    batches = sample.batches
    dearer = [c.target / target(b, 1) for c, b in zip(costs, batches, strict=True)]
    method = Method(
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
        dearness=_ratio(batches, dearer),
        overhead=CostCurve(batches, tuple(c.other for c in costs)),
        node_overhead=none,
    )
    return method, runs


def measure_method(
    llm: LLM, candidate: Candidate, target: TargetCosts, plain: Method, sample: Sample
) -> Method:
    """A drafter's acceptance and costs. ``llm`` has it loaded and is idle."""
    drafter = llm.engine.drafter
    batches = sample.batches
    rehearsed = measure(drafter.rehearse, list(target.batches), llm.target.device)
    profile = Profile.of(drafter, LONGEST, rehearsed)
    # A draft must have room in the answers, or nothing is learnt of it.
    longest = max(1, min(profile.longest, sample.max_tokens // 3))
    runs = _runs(llm, sample, longest)
    levels = Levels(longest)
    for run in runs:
        levels.add(run.levels)
    fill = levels.nodes / max(1, levels.steps * profile.nodes[longest])
    nodes = tuple(fill * most for most in profile.nodes)
    deepest = max(1, sum(count > 0 for count in levels.reached))  # others never drafted so far
    costs = [_typical(run.steps, batch, target) for run, batch in zip(runs, batches, strict=True)]
    return Method(
        label=candidate.label,
        spec=candidate.spec,
        family=candidate.family,
        shape=candidate.shape,
        survival=levels.survival()[:deepest],
        acceptance=levels.acceptance()[:deepest],
        reached=tuple(levels.reached[:deepest]),
        nodes=nodes[: deepest + 1],
        passes=profile.passes[: deepest + 1],
        overhead=plain.overhead,
        parameters=_parameters(drafter),
        **_curves(costs, batches, profile.passes[longest], rehearsed, target, plain),
    )


def _curves(
    costs: Sequence[Step],
    batches: tuple[int, int],
    passes: int,
    rehearsed: CostCurve,
    target: TargetCosts,
    plain: Method,
) -> dict[str, CostCurve]:
    """How real steps differ from forwards measured alone, at both batch sizes."""
    pairs = list(zip(costs, batches, strict=True))
    handling = CostCurve((1,), (0.0,))
    pass_seconds = rehearsed
    if passes:
        dearer = _ratio(batches, [c.draft / passes / rehearsed(b) for c, b in pairs])
        points = rehearsed.tokens
        pass_seconds = CostCurve(points, tuple(rehearsed(b) * dearer(b) for b in points))
    else:
        handling = CostCurve(batches, tuple(c.draft for c, _ in pairs))
    return {
        "pass_seconds": pass_seconds,
        "handling": handling,
        "dearness": _ratio(
            batches, [c.target / target(b, 1 + c.nodes / c.batch) for c, b in pairs]
        ),
        "node_overhead": CostCurve(
            batches,
            tuple(
                max(0.0, c.other - plain.overhead(b)) / max(1.0, c.nodes / c.batch)
                for c, b in pairs
            ),
        ),
    }


def _runs(llm: LLM, sample: Sample, length: int) -> list[Run]:
    """One sequence at a time, and many; the first steps of a run are warm-up."""
    params = sample.params(length)
    return [
        decode(llm, prompts, batch, params, length)
        for prompts, batch in zip((sample.alone, sample.together), sample.batches, strict=True)
    ]


def _typical(steps: Sequence[Step], batch: int, target: TargetCosts) -> Step:
    """The mean of the faster three quarters of the fullest steps: noise only adds.

    Fast is judged by the target forward against what it should take, so that steps which verify
    little are not preferred.
    """
    most = max((step.batch for step in steps), default=1)
    chosen = [step for step in steps if step.batch == min(batch, most)]
    chosen = [step for step in chosen if step.full] or chosen
    chosen.sort(key=lambda step: step.target / target(step.batch, 1 + step.nodes / step.batch))
    kept = chosen[: -(-3 * len(chosen) // 4)]
    if not kept:
        return Step(batch, 0, 0, 0.0, target(batch, 1), 0.0, True)  # every answer was one token
    return Step(
        batch=kept[0].batch,
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
