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
from paceline.lab.bench.runner import Heat, HeatRecord
from paceline.lab.bench.runs import BenchEngine, TimedRun
from paceline.llm import LLM

# -- what goes in --------------------------------------------------------------------------------


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


# -- what comes out ------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Steady:
    """Decoding as it was measured: medians over rounds."""

    phases: dict[str, float]  # seconds of one step that only decodes
    in_flight: float  # sequences in such a step
    in_steps: float  # seconds per token of steps that only decode
    beside: float  # seconds per token of all else: reading prompts, and between steps
    per_token: float

    @classmethod
    def of(cls, rounds: Sequence[TimedRun]) -> _Steady:
        used = [outcome for outcome in rounds if outcome.decoding_steps and outcome.tokens]

        def middle(figure: Callable[[TimedRun], float]) -> float:
            return statistics.median(map(figure, used))

        def each(phase: str) -> float:
            return middle(lambda outcome: outcome.phases[phase] / outcome.decoding_steps)

        return cls(
            {phase: each(phase) for phase in used[0].phases},
            _in_flight(used),
            middle(lambda outcome: _in_steps(outcome) / outcome.tokens),
            middle(lambda outcome: (outcome.seconds - _in_steps(outcome)) / outcome.tokens),
            middle(lambda outcome: outcome.seconds / outcome.tokens),
        )

    @property
    def step(self) -> float:
        return sum(self.phases.values())


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
    if not (_decodes(plain_rounds) and _decodes(rounds)):
        return None
    plain, spec = _Steady.of(plain_rounds), _Steady.of(rounds)
    batch, base = round(spec.in_flight), alone.verify(round(plain.in_flight), 0)
    scale, passes = (
        plain.phases["target"] / base,
        drafts.passes * alone.passes(DRAFTER, [1] * batch),
    )
    step = {
        "draft": scale * passes,
        "target": scale * alone.verify(batch, drafts.nodes),
        "verify": spec.phases["verify"],
        "other": plain.phases["other"],
    }
    tokens = 1.0 + sum(accumulate(drafts.rates, mul))
    # At the end of a run fewer requests are left, and not as soon for both.
    ladder = _Ladder(plain.step / plain.in_flight * spec.in_flight, step, tokens)
    predicted = ladder.speedup
    ladder.raise_to("drafting dearer than its passes alone", "draft", spec.phases["draft"])
    ladder.raise_to("checking dearer than alone", "target", spec.phases["target"])
    ladder.raise_to("bookkeeping of drafts", "other", spec.phases["other"])
    decoding = ladder.speedup
    whole = (plain.in_steps + plain.beside) / (spec.in_steps + spec.beside)
    ladder.settle("reading prompts, and between steps", whole)
    reported = plain.per_token / spec.per_token if measured is None else measured
    ladder.settle("rest", reported)
    rate = passes / base / drafts.levels if drafts.levels else 0.0
    return Prediction(
        textbook=textbook_speedup(drafts.acceptance, drafts.levels, rate),
        tokens_per_step=tokens,
        plain_step=plain.step,
        step=sum(step.values()),
        measured_step=spec.step,
        predicted=predicted,
        decoding=decoding,
        measured=reported,
        items=tuple(ladder.items),
    )


class _Ladder:
    """From the predicted speedup to the measured one, an ingredient at a time."""

    def __init__(self, plain_step: float, step: dict[str, float], tokens: float) -> None:
        self._plain = plain_step
        self._step = dict(step)
        self._tokens = tokens
        self.items: list[Item] = []
        self.speedup = self._now()

    def _now(self) -> float:
        return self._tokens * self._plain / sum(self._step.values())

    def raise_to(self, name: str, phase: str, seconds: float) -> None:
        """A phase takes what was measured."""
        more = seconds - self._step[phase]
        self._step[phase] = seconds
        self.settle(name, self._now(), more)

    def settle(self, name: str, speedup: float, seconds: float | None = None) -> None:
        """Without ``seconds``, what no step explains."""
        self.items.append(Item(name, speedup - self.speedup, seconds))
        self.speedup = speedup


# -- measuring -----------------------------------------------------------------------------------


def compare(
    llm: LLM,
    plain_rounds: Sequence[TimedRun],
    rounds: Sequence[TimedRun],
    context: int = 64,
    measured: float | None = None,
) -> Prediction | None:
    """Measure what the forwards of a speculative engine take alone, and ``predict``.

    ``plain_rounds`` are of our own plain decoding, ``context`` the mean length of the requests in
    tokens, prompt and half of the
    answer. The engine must be idle.
    """
    engine = llm.engine
    drafts = MeanDraft.of(engine.drafter, rounds)
    batches = round(_in_flight(plain_rounds)), round(_in_flight(rounds))
    alone = measure_alone(engine, drafts.nodes, *batches, context)
    return predict(plain_rounds, rounds, drafts, alone, measured)


# -- counting ------------------------------------------------------------------------------------


def _decodes(rounds: Sequence[TimedRun]) -> bool:
    return any(outcome.decoding_steps and outcome.tokens for outcome in rounds)


def _in_steps(outcome: TimedRun) -> float:
    return sum(outcome.phases.values())


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
    heats = [
        heat
        for heat in record.heats
        if (heat.job.concurrency, heat.job.temperature) == (concurrency, temperature)
    ]
    if not heats:
        return []
    turns = complete(heats)
    plain = [merged([heat.outcomes[PLAIN] for heat in turn]) for turn in turns]
    context = _context(turns[0])
    asked = {method.name: method for method in methods if method.speculates}
    found = []
    for engine in engines:
        method = asked.get(engine.name)
        if method is None or not isinstance(engine, Paceline):
            continue
        rounds = [merged([heat.outcomes[engine.name] for heat in turn]) for turn in turns]
        ratios = [own.rate / other.rate for own, other in zip(rounds, plain, strict=True)]
        prediction = compare(
            engine.llm,
            plain,
            rounds,
            context=context,
            measured=statistics.median(ratios),
        )
        if prediction is not None:
            found.append(Predicted(engine.name, concurrency, prediction))
    return found


def _context(heats: Sequence[Heat]) -> int:
    """Mean tokens of a request while it decodes: its prompt and half of its answer."""
    asks = [ask for heat in heats for ask in heat.job.asks]
    return round(statistics.mean(len(ask.prompt) + ask.params.max_tokens / 2 for ask in asks))
