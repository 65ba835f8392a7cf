"""Predicted against measured speedup: what acceptance and costs promise, and where it goes.

A benchmark that has timed rounds of the same requests, plain and speculative, calls::

    prediction = compare(llm.engine, length, plain_rounds, rounds, context)

``predict_and_measure`` runs the rounds as well. ``predict`` is the pure part.

The forwards of target and drafter are measured alone, one after the other as a step needs them;
acceptance, and the time of a plain step, come from the runs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.params import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.driver import column_sums
from paceline.tools.bench.contestants import Paceline
from paceline.tools.bench.forwards import Alone, measure_alone
from paceline.tools.bench.methods import PLAIN, Method
from paceline.tools.bench.outcome import Ask, TimedRun

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.llm import LLM

_FULL = 0.98  # drafts this complete are those of a drafter that always drafts what it is asked for


# -- the formulas --------------------------------------------------------------------------------


def expected_tokens(rates: Sequence[float]) -> float:
    """Tokens of a step: 1 + a_1 + a_1 a_2 + ...; rate i is conditional on those before."""
    return 1.0 + sum(itertools.accumulate(rates, lambda chance, rate: chance * rate))


def textbook_speedup(rate: float, length: float, cost: float) -> float:
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), Leviathan et al. 2023, theorem 3.8.

    One acceptance ``rate`` a for all positions, drafts of g tokens, and a drafter whose pass
    takes ``cost`` c of a target forward. Verifying g + 1 tokens is taken to cost what one does.
    """
    tokens = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    return tokens / (length * cost + 1)


# -- what goes in --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanDraft:
    """The drafts of a method, in the mean of its steps.

    ``levels``, tree ``nodes`` and drafter ``passes`` of a sequence's step. ``rates``: the chance
    that a step gains token i of the draft, given that it gained those before. ``planned``: every
    draft has the length asked for, but for the first and the last of a request; otherwise
    (adaptive length, look-up) ``rates`` count positions not drafted as not gained.
    ``acceptance`` is the share of the tokens tried that were accepted; ``full`` the share of
    steps in which the whole draft was.
    """

    levels: float
    nodes: float
    passes: float
    rates: tuple[float, ...]
    acceptance: float
    planned: bool
    full: float

    @classmethod
    def of(cls, drafter: Drafter, length: int | None, rounds: Sequence[TimedRun]) -> MeanDraft:
        """From what was counted; ``length`` is None where it adapts."""
        steps = sum(outcome.steps for outcome in rounds)
        drafted = sum(outcome.drafted or 0 for outcome in rounds)
        reached = column_sums([outcome.reached for outcome in rounds])
        accepted = column_sums([outcome.accepted_at for outcome in rounds])
        tried = sum(reached)
        acceptance = sum(accepted) / tried if tried else 0.0
        # A token was accepted and there was no further one to try.
        whole = sum(won - on for won, on in zip(accepted, [*reached[1:], 0], strict=True))
        full = whole / steps if steps else 0.0
        if length and drafted >= _FULL * _complete(drafter, length, rounds):
            rates = [won / of for won, of in zip(accepted, reached, strict=True) if of]
            nodes, passes = drafter.max_nodes(length), drafter.passes(length)
            return cls(length, nodes, passes, tuple(rates), acceptance, True, full)
        before = [steps, *accepted]
        rates = [won / of for won, of in zip(accepted, before, strict=False) if of]
        nodes_each = drafted / steps if steps else 0.0
        depths = [outcome.levels for outcome in rounds if outcome.levels is not None]
        if len(depths) == len(rounds):
            levels = sum(depths) / steps if steps else 0.0
        else:
            levels = _levels(drafter, nodes_each)
        passes_each = _between(drafter.passes, levels)
        return cls(levels, nodes_each, passes_each, tuple(rates), acceptance, False, full)


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
    measured_tokens_per_step: float
    plain_step: float
    step: float
    measured_step: float
    predicted: float
    decoding: float
    measured: float
    items: tuple[Item, ...]

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1.1 promises 10 % too much."""
        return self.predicted / self.measured

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class _Steady:
    """Decoding as it was measured: medians over rounds."""

    phases: dict[str, float]  # seconds of one step that only decodes
    tokens_per_step: float  # of one sequence
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
            sum(outcome.tokens for outcome in used) / sum(outcome.steps for outcome in used),
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
    alone: Alone,
    measured: float | None = None,
) -> Prediction | None:
    """The speedup that follows from acceptance and costs, beside the measured one.

    A plain step is as measured. A speculative one has the drafter's passes and the target's larger
    forward, as multiples of the plain forward (all three measured alone), the verifying it was
    measured with, and the bookkeeping of a plain step. ``measured`` is the caller's own figure for
    whole runs, by default that of the medians here. None if no step only decoded.
    """
    if not (_decodes(plain_rounds) and _decodes(rounds)):
        return None
    plain, spec = _Steady.of(plain_rounds), _Steady.of(rounds)
    scale = plain.phases["target"] / alone.plain
    step = {
        "draft": scale * alone.draft,
        "target": scale * alone.check,
        "verify": spec.phases["verify"],
        "other": plain.phases["other"],
    }
    tokens = expected_tokens(drafts.rates)
    # At the end of a run fewer requests are left, and not as soon for both.
    ladder = _Ladder(plain.step / plain.in_flight * spec.in_flight, step, tokens)
    predicted = ladder.speedup
    ladder.add(
        "draft model reads two tokens after a full draft",
        draft=scale * alone.catch_up * drafts.full,
    )
    ladder.raise_to("drafting dearer than its passes alone", "draft", spec.phases["draft"])
    ladder.raise_to("checking dearer than alone", "target", spec.phases["target"])
    ladder.raise_to("bookkeeping of drafts", "other", spec.phases["other"])
    ladder.gain("drafts short or missing where a request begins or ends", spec.tokens_per_step)
    decoding = ladder.speedup
    whole = (plain.in_steps + plain.beside) / (spec.in_steps + spec.beside)
    ladder.settle("reading prompts, and between steps", whole)
    reported = plain.per_token / spec.per_token if measured is None else measured
    ladder.settle("rest", reported)
    rate = alone.draft / alone.plain / drafts.levels if drafts.levels else 0.0
    return Prediction(
        textbook=textbook_speedup(drafts.acceptance, drafts.levels, rate),
        tokens_per_step=tokens,
        measured_tokens_per_step=spec.tokens_per_step,
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

    def add(self, name: str, **seconds: float) -> None:
        """A phase takes so much more."""
        for phase, more in seconds.items():
            self._step[phase] += more
        self._move(name, self._now(), sum(seconds.values()))

    def raise_to(self, name: str, phase: str, seconds: float) -> None:
        """A phase takes what was measured."""
        self.add(name, **{phase: seconds - self._step[phase]})

    def gain(self, name: str, tokens: float) -> None:
        """A step gains the tokens that were measured."""
        self._tokens = tokens
        self._move(name, self._now())

    def settle(self, name: str, speedup: float) -> None:
        """What no step explains."""
        self._move(name, speedup)

    def _move(self, name: str, speedup: float, seconds: float | None = None) -> None:
        self.items.append(Item(name, speedup - self.speedup, seconds))
        self.speedup = speedup


# -- measuring -----------------------------------------------------------------------------------


def compare(
    engine: Engine,
    length: int | None,
    plain_rounds: Sequence[TimedRun],
    rounds: Sequence[TimedRun],
    context: int = 64,
    measured: float | None = None,
) -> Prediction | None:
    """Measure what the forwards of a speculative engine take alone, and ``predict``.

    ``length`` is its fixed draft length, None where it adapts. ``plain_rounds`` are of our own
    plain decoding, ``context`` the mean length of the requests in tokens, prompt and half of the
    answer. The engine must be idle.
    """
    drafts = MeanDraft.of(engine.drafter, length, rounds)
    alone = measure_alone(
        engine,
        drafts.nodes,
        drafts.passes,
        batch=round(_in_flight(rounds)),
        context=context,
        plain_batch=round(_in_flight(plain_rounds)),
    )
    return predict(plain_rounds, rounds, drafts, alone, measured)


def predict_and_measure(
    plain: LLM,
    spec: LLM,
    prompts: Sequence[Sequence[int]],
    length: int | None,
    *,
    clients: int = 1,
    max_tokens: int = 64,
    rounds: int = 3,
) -> Prediction | None:
    """Decode ``prompts`` with both in turn, greedily, and predict; see ``predict``.

    ``length`` is the draft length that ``spec`` was made with, None for "auto".
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    asks = [Ask(tuple(prompt), params) for prompt in prompts]
    sides = [
        Paceline(Method(PLAIN), lambda: plain, clients),
        Paceline(Method("speculative"), lambda: spec, clients),
    ]
    for side in sides:
        side.run(asks[:1])
    outcomes = [[side.run(asks) for side in sides] for _ in range(rounds)]
    ours, theirs = [pair[0] for pair in outcomes], [pair[1] for pair in outcomes]
    context = round(statistics.mean(map(len, prompts)) + max_tokens / 2)
    return compare(spec.engine, length, ours, theirs, context)


# -- counting ------------------------------------------------------------------------------------


def _decodes(rounds: Sequence[TimedRun]) -> bool:
    return any(outcome.decoding_steps and outcome.tokens for outcome in rounds)


def _in_steps(outcome: TimedRun) -> float:
    return sum(outcome.phases.values())


def _in_flight(rounds: Sequence[TimedRun]) -> float:
    """Sequences in a step that only decodes; 1 if there was none."""
    steps = sum(outcome.decoding_steps for outcome in rounds)
    return sum(outcome.decoding_slots for outcome in rounds) / steps if steps else 1.0


def _complete(drafter: Drafter, length: int, rounds: Sequence[TimedRun]) -> int:
    """Nodes that would have been drafted if every draft had the length that its request allows.

    Without the first step of a request: some drafters have nothing to start from there.
    """
    nodes = 0
    for outcome in rounds:
        for answer in outcome.answers:
            left = len(answer.tokens)
            for place, (_, count) in enumerate(answer.arrivals):
                nodes += drafter.max_nodes(min(length, left - 1)) if place else 0
                left -= count
    return nodes


def _levels(drafter: Drafter, nodes: float) -> float:
    """The draft length at which a draft has so many nodes, between whole ones if need be."""
    length, below, above = 0, drafter.max_nodes(0), drafter.max_nodes(1)
    while below < above <= nodes:  # trees of so many nodes at most grow no further
        length += 1
        below, above = above, drafter.max_nodes(length + 1)
    return length + (nodes - below) / (above - below) if above > below else float(length)


def _between(figure: Callable[[int], int], place: float) -> float:
    low = int(place)
    return figure(low) + (place - low) * (figure(low + 1) - figure(low))
