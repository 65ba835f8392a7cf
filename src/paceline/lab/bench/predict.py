"""Predicted against measured speedup: what acceptance and costs promise, and where it goes.

A benchmark that has timed rounds of the same requests, plain and speculative, calls::

    prediction = compare(llm, plain_rounds, rounds, context)

``predict`` is the pure part.

The forwards of target and drafter are measured alone, as at start-up, and asked of the same cost
model; acceptance, and the time of a plain step, come from the runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from paceline.control.cost import CostModel, predicted_by_measured, textbook_speedup
from paceline.engine.alone import DRAFTER, measure_alone
from paceline.engine.driver import column_sums
from paceline.lab.bench.engines import Paceline
from paceline.lab.bench.figures import complete, merged
from paceline.lab.bench.methods import PLAIN, Method
from paceline.lab.bench.runner import HeatRecord
from paceline.lab.bench.runs import BenchEngine, TimedRun
from paceline.llm import LLM

# Why a step takes other than predicted, and the phase that says it.
_REASONS = {
    "drafting dearer than its passes alone": "draft",
    "checking dearer than alone": "target",
    "bookkeeping of drafts": "other",
}


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
    acceptance: float

    @classmethod
    def of(cls, drafter: Any, rounds: Sequence[TimedRun]) -> MeanDraft:
        """From what was counted."""
        steps = max(1, sum(outcome.steps for outcome in rounds))
        reached = column_sums([outcome.reached for outcome in rounds])
        accepted = column_sums([outcome.accepted_at for outcome in rounds])
        pairs = zip(accepted, [steps, *accepted], strict=False)
        levels = sum(outcome.levels or 0 for outcome in rounds) / steps
        low = int(levels)
        below, above = drafter.passes(low), drafter.passes(low + 1)
        return cls(
            levels,
            nodes=sum(outcome.drafted or 0 for outcome in rounds) / steps,
            passes=below + (levels - low) * (above - below),
            rates=tuple(won / of for won, of in pairs if of),
            acceptance=sum(accepted) / max(1, sum(reached)),
        )


@dataclass(frozen=True)
class Item:
    """One reason why the measured speedup is not the predicted one, and by how much.

    ``seconds`` that it adds to a speculative step; None for what is not a matter of a step.
    """

    name: str
    speedup: float
    seconds: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Speedups over our own plain decoding. Steps in seconds, without the reading of prompts.

    ``textbook``: one mean acceptance rate and the cost of a drafter's pass. ``predicted``: rates by
    position, the target's forward over a whole draft, and what verifying and bookkeeping take in a
    step. ``decoding``: measured in the steps that only decode. ``measured``: of whole runs.
    The ``items`` add up to ``measured - predicted``.
    """

    textbook: float
    tokens_per_step: float
    plain_step: float
    step: float
    measured_step: float
    predicted: float
    decoding: float
    measured: float
    items: tuple[Item, ...]

    @property
    def predicted_by_measured(self) -> float:
        """1.1 promises 10 % too much."""
        return predicted_by_measured(self.predicted, self.measured)

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "predicted_by_measured": self.predicted_by_measured}


class _Steady:
    """Decoding as it was measured: medians over rounds. ``phases``: seconds of a step that only
    decodes; ``in_flight``: sequences in such a step; ``in_steps`` and ``beside``: seconds a token
    of these steps, and of all else (reading prompts, and between steps)."""

    def __init__(self, rounds: Sequence[TimedRun]) -> None:
        used = [one for one in rounds if one.decoding_steps and one.tokens]
        self.decodes = bool(used)
        if not used:
            return

        def middle(figure: Callable[[TimedRun], float]) -> float:
            return statistics.median(map(figure, used))

        self.phases = {
            phase: middle(lambda one, phase=phase: one.phases[phase] / one.decoding_steps)  # type: ignore[misc]
            for phase in used[0].phases
        }
        self.step = sum(self.phases.values())
        self.in_flight = _in_flight(used)
        self.in_steps = middle(lambda one: sum(one.phases.values()) / one.tokens)
        self.beside = middle(lambda one: (one.seconds - sum(one.phases.values())) / one.tokens)
        self.per_token = middle(lambda one: one.seconds / one.tokens)


def predict(
    plain_rounds: Sequence[TimedRun],
    rounds: Sequence[TimedRun],
    drafts: MeanDraft,
    alone: CostModel,
    measured: float | None = None,
) -> Prediction | None:
    """The speedup that follows from acceptance and costs, beside the measured one.

    A plain step is as measured. A speculative one has the drafter's passes and the target's larger
    forward, as multiples of the plain forward (all three ``alone``, see ``measure_alone``), the
    verifying it was measured with, and the bookkeeping of a plain step. ``measured`` is the
    caller's own figure for whole runs, by default that of the medians here. None if no step only
    decoded.
    """
    plain, spec = _Steady(plain_rounds), _Steady(rounds)
    if not (plain.decodes and spec.decodes):
        return None
    batch, base = round(spec.in_flight), alone.verify(round(plain.in_flight), 0)
    scale = plain.phases["target"] / base
    passes = drafts.passes * alone.passes(DRAFTER, [1] * batch)
    step = {
        "draft": scale * passes,
        "target": scale * alone.verify(batch, drafts.nodes),
        "verify": spec.phases["verify"],
        "other": plain.phases["other"],
    }
    predicted_step = sum(step.values())
    tokens = 1.0 + sum(accumulate(drafts.rates, mul))
    # At the end of a run fewer requests are left, and not as soon for both.
    gained = tokens * plain.step / plain.in_flight * spec.in_flight
    speedup = predicted = gained / predicted_step
    # From the predicted speedup to the measured one, an ingredient at a time.
    items = []
    for name, phase in _REASONS.items():
        more = spec.phases[phase] - step[phase]
        step[phase] = spec.phases[phase]
        after = gained / sum(step.values())
        items.append(Item(name, after - speedup, more))
        speedup = after
    decoding = speedup
    whole = (plain.in_steps + plain.beside) / (spec.in_steps + spec.beside)
    reported = plain.per_token / spec.per_token if measured is None else measured
    items.append(Item("reading prompts, and between steps", whole - decoding))
    items.append(Item("rest", reported - whole))
    rate = passes / base / drafts.levels if drafts.levels else 0.0
    return Prediction(
        textbook=textbook_speedup(drafts.acceptance, drafts.levels, rate),
        tokens_per_step=tokens,
        plain_step=plain.step,
        step=predicted_step,
        measured_step=spec.step,
        predicted=predicted,
        decoding=decoding,
        measured=reported,
        items=tuple(items),
    )


def compare(
    llm: LLM,
    plain_rounds: Sequence[TimedRun],
    rounds: Sequence[TimedRun],
    context: int = 64,
    measured: float | None = None,
) -> Prediction | None:
    """Measure what the forwards of a speculative engine take alone, and ``predict``.

    ``plain_rounds`` are of our own plain decoding, ``context`` the mean length of the requests in
    tokens, prompt and half of the answer. The engine must be idle.
    """
    engine = llm.engine
    drafts = MeanDraft.of(engine.drafter, rounds)
    batches = round(_in_flight(plain_rounds)), round(_in_flight(rounds))
    alone = measure_alone(engine, drafts.nodes, *batches, context)
    return predict(plain_rounds, rounds, drafts, alone, measured)


def _in_flight(rounds: Sequence[TimedRun]) -> float:
    """Sequences in a step that only decodes; 1 if there was none."""
    steps = sum(outcome.decoding_steps for outcome in rounds)
    return sum(outcome.decoding_slots for outcome in rounds) / steps if steps else 1.0


@dataclass(frozen=True)
class Predicted:
    """What was expected of a method at a concurrency, and what came of it."""

    method: str
    concurrency: int
    prediction: Prediction


def predictions(
    record: HeatRecord,
    methods: Sequence[Method],
    engines: Sequence[BenchEngine],
    concurrency: int,
    temperature: float,
) -> list[Predicted]:
    """For our speculative methods, from the heats at one concurrency and temperature.

    ``engines`` must still be those that ran: what their forwards take alone is measured now.
    A method whose every step also read prompts has none.
    """
    cell = concurrency, temperature
    heats = [h for h in record.heats if (h.job.concurrency, h.job.temperature) == cell]
    if not heats:
        return []
    turns = complete(heats)

    def runs_of(name: str) -> list[TimedRun]:
        return [merged([heat.outcomes[name] for heat in turn]) for turn in turns]

    # Mean tokens of a request while it decodes: its prompt and half of its answer.
    asks = [ask for heat in turns[0] for ask in heat.job.asks]
    context = statistics.mean(len(ask.prompt) + ask.params.max_tokens / 2 for ask in asks)
    plain, measured_ratios = runs_of(PLAIN), []
    speculative = {method.name for method in methods if method.speculates}
    for engine in engines:
        if isinstance(engine, Paceline) and engine.name in speculative:
            rounds = runs_of(engine.name)
            ratios = [run.rate / other.rate for run, other in zip(rounds, plain, strict=True)]
            measured = statistics.median(ratios)
            prediction = compare(engine.llm, plain, rounds, round(context), measured)
            if prediction is not None:
                measured_ratios.append(Predicted(engine.name, concurrency, prediction))
    return measured_ratios
