"""Predicted against measured speedup: what acceptance and costs promise.

The forwards of target and drafter are measured alone, as at start-up, and asked of the same cost
model; acceptance, and the time of a plain step, come from the runs. ``predict`` is the pure part.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from paceline.control.cost import CostModel
from paceline.engine.alone import DRAFTER, measure_alone
from paceline.lab.bench.engines import Paceline
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.runs import BenchEngine, HeatRecord, TimedRun, complete, merged, rounds_of
from paceline.lab.prediction import predicted_by_measured


@dataclass(frozen=True)
class MeanDraft:
    """The drafts of a method, in the mean of its steps.

    ``levels``, tree ``nodes`` and drafter ``passes`` of a sequence's step. ``rates``: the chance
    that a step gains token i of the draft, given that it gained those before; positions that were
    not drafted count as not gained. ``acceptance`` is the share of the tokens tried that were
    accepted.
    """

    levels: float
    nodes: float
    passes: float
    rates: tuple[float, ...]

    @classmethod
    def of(cls, drafter: Any, rounds: Sequence[TimedRun]) -> MeanDraft:
        """From what was counted."""
        whole = merged(rounds)
        steps, accepted = max(1, whole.steps), whole.accepted_at
        pairs = zip(accepted, [steps, *accepted], strict=False)
        levels = (whole.levels or 0) / steps
        low = int(levels)
        below, above = drafter.passes(low), drafter.passes(low + 1)
        return cls(
            levels,
            nodes=(whole.drafted or 0) / steps,
            passes=below + (levels - low) * (above - below),
            rates=tuple(count / before for count, before in pairs if before),
        )


@dataclass(frozen=True)
class Prediction:
    """Speedups over our own plain decoding. Steps in seconds, without the reading of prompts.

    ``predicted``: rates by position, the target's forward over a whole draft, and what verifying
    and bookkeeping take in a step. ``decoding``: measured in the steps that only decode.
    ``measured``: of whole runs.
    """

    method: str
    concurrency: int
    tokens_per_step: float
    plain_step: float
    step: float
    measured_step: float
    predicted: float
    decoding: float
    measured: float

    @property
    def predicted_by_measured(self) -> float:
        """1.1 promises 10 % too much."""
        return predicted_by_measured(self.predicted, self.measured)

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "predicted_by_measured": self.predicted_by_measured}


def _mean_step(rounds: Sequence[TimedRun]) -> tuple[dict[str, float], float] | None:
    """A step that only decodes: median seconds over the rounds by phase, and its sequences."""
    used = [run.decoding for run in rounds if run.decoding.steps]
    if not used:
        return None
    phases = {p: statistics.median(sums.mean_seconds(p) for sums in used) for p in used[0].seconds}
    return phases, sum(s.sequences for s in used) / sum(s.steps for s in used)


def predict(
    method: str,
    concurrency: int,
    plain_rounds: Sequence[TimedRun],
    rounds: Sequence[TimedRun],
    drafts: MeanDraft,
    alone: CostModel,
) -> Prediction | None:
    """The speedup that follows from acceptance and costs, beside the measured one.

    A plain step is as measured. A speculative one has the drafter's passes and the target's larger
    forward, as multiples of the plain forward (all three ``alone``, see ``measure_alone``), the
    verifying it was measured with, and the bookkeeping of a plain step. None if no step only
    decoded.
    """
    steps = _mean_step(plain_rounds), _mean_step(rounds)
    if steps[0] is None or steps[1] is None:
        return None
    (plain, plain_batch), (spec, spec_batch) = steps[0], steps[1]
    plain_step, spec_step, batch = sum(plain.values()), sum(spec.values()), round(spec_batch)
    scale = plain["target"] / alone.verify(round(plain_batch), 0)
    passes = drafts.passes * alone.passes(DRAFTER, [1] * batch)
    step = scale * (passes + alone.verify(batch, drafts.nodes))
    step += spec["verify"] + plain["other"]
    tokens = 1.0 + sum(accumulate(drafts.rates, mul))
    # At the end of a run fewer requests are left, and not as soon for both.
    gained = tokens * plain_step / plain_batch * spec_batch
    ratios = [run.rate / other.rate for run, other in zip(rounds, plain_rounds, strict=True)]
    return Prediction(
        method,
        concurrency,
        tokens_per_step=tokens,
        plain_step=plain_step,
        step=step,
        measured_step=spec_step,
        predicted=gained / step,
        decoding=gained / spec_step,
        measured=statistics.median(ratios),
    )


def predictions(
    record: HeatRecord, engines: Sequence[BenchEngine], concurrency: int, temperature: float
) -> list[Prediction]:
    """For our speculative methods, from the heats at one concurrency and temperature.

    ``engines`` must be those that ran, and idle: what their forwards take alone is measured now.
    A method whose every step also read prompts has none.
    """
    heats = record.of(concurrency, temperature)
    if not heats:
        return []
    turns = complete(heats)
    # Mean tokens of a request while it decodes: its prompt and half of its answer.
    asks = [ask for heat in turns[0] for ask in heat.job.asks]
    context = round(statistics.mean(len(a.prompt) + a.params.max_tokens / 2 for a in asks))
    plain, made = rounds_of(turns, PLAIN), []
    for engine in engines:
        if not isinstance(engine, Paceline) or engine.method.draft is None:
            continue
        rounds, inner = rounds_of(turns, engine.name), engine.llm.engine
        drafts = MeanDraft.of(inner.drafter, rounds)
        steps = [_mean_step(plain), _mean_step(rounds)]
        few, many = (1 if step is None else round(step[1]) for step in steps)
        alone = measure_alone(inner, drafts.nodes, few, many, context)
        made.append(predict(engine.name, concurrency, plain, rounds, drafts, alone))
    return [prediction for prediction in made if prediction is not None]
