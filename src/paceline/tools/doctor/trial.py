"""Ten seconds of decoding with a loaded pair: what acceptance and costs promise, and what comes.

Plain decoding and drafts of two fixed lengths take turns on the shipped prompts. From the steps'
own clock follow the target's time by rows, the drafter's by pass, and the chance that a step gains
token i of a draft; these predict the speedup of every length, and the best one is then run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.core.costs import CostCurve
from paceline.core.params import SamplingParams
from paceline.engine.clock import PHASES
from paceline.engine.driver import Drive, StepSums, sequence
from paceline.tools.bench.predict import expected_tokens, textbook_speedup
from paceline.tools.bench.prompts import load_prompts

if TYPE_CHECKING:
    from paceline.llm import LLM

SECONDS = 10.0  # of measuring, by default
LONG, _SHORT = 8, 2  # draft lengths of the exploration
_EXPLORE = 0.6  # of the seconds; the rest confirms
_MOST_TOKENS, _LEAST_TOKENS, _PROMPT_TOKENS = 64, LONG + 2, 256


@dataclass(frozen=True)
class TrialCounts:
    """Steps that only decode: the one that reads the prompt is left out.

    ``nodes`` drafted in all; ``reached[i]`` drafts had a token to try at position i, and of
    ``accepted[i]`` it was right.
    """

    tokens: int
    steps: int
    seconds: dict[str, float]  # by phase
    nodes: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: TrialCounts) -> TrialCounts:
        return TrialCounts(
            self.tokens + other.tokens,
            self.steps + other.steps,
            {phase: self.seconds[phase] + other.seconds[phase] for phase in PHASES},
            self.nodes + other.nodes,
            _sums(self.reached, other.reached),
            _sums(self.accepted, other.accepted),
        )

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.seconds.values())

    def each(self, *phases: str) -> float:
        """Seconds of these phases in a step."""
        return sum(self.seconds[phase] for phase in phases) / self.steps


@dataclass(frozen=True)
class Exploration:
    """Plain decoding, and that with drafts of ``LONG`` and of fewer tokens, on the same prompts.

    ``passes[g]`` and ``nodes[g]``: the drafter's forwards for a draft of g tokens, and its most
    nodes.
    """

    plain: TrialCounts
    long: TrialCounts
    short: TrialCounts
    passes: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        """Of the drafted tokens that were tried, the share that was accepted."""
        tried = sum(self.long.reached)
        return sum(self.long.accepted) / tried if tried else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Conditional: given that all tokens before were accepted."""
        pairs = zip(self.long.accepted, self.long.reached, strict=True)
        return tuple(won / tried for won, tried in pairs if tried)

    @property
    def cost_ratio(self) -> float | None:
        """One pass of the drafter over one plain target forward; None if it takes none."""
        return self._pass / self.plain.each("target") if self.passes[-1] else None

    @property
    def _pass(self) -> float:
        """Seconds of one pass of the drafter."""
        made = self.long.nodes if self.chain else self.passes[-1] * self.long.steps
        return self.long.seconds["draft"] / max(1, made)

    @cached_property
    def target(self) -> CostCurve:
        """Seconds of a target forward by its rows, which are means over steps and rounded."""
        points = {1: self.plain.each("target")}
        for decoded in (self.short, self.long):
            rows = round(1 + decoded.nodes / decoded.steps)
            if rows > max(points):
                points[rows] = max(decoded.each("target"), max(points.values()))
        return CostCurve(tuple(points), tuple(points.values()))

    @property
    def chain(self) -> bool:
        """Whether every draft is a chain of as many tokens as were asked for."""
        return self.passes[-1] == self.nodes[-1] == len(self.nodes) - 1

    def tokens(self, length: int) -> float:
        """Expected in a step: the target's own, and each drafted one by how often it was gained."""
        if self.chain:  # shorter ones were cut by the end of the request
            return expected_tokens(self.per_position[:length])
        return 1 + sum(self.long.accepted[:length]) / self.long.steps

    def step(self, length: int) -> float:
        """Seconds of a step with drafts of ``length`` tokens, from the phases of the others."""
        passes = self.passes[length]
        drafting = passes * self._pass if self.passes[-1] else self.long.each("draft")
        # Look-up drafters do not always find something: as many nodes as they did.
        found = self.long.nodes / self.long.steps / max(1, self.nodes[-1])
        rows = 1 + self.nodes[length] * (1 if self.chain else found)
        return drafting + self.target(rows) + self.long.each("verify", "other")

    def speedup(self, length: int) -> float:
        """Predicted, over plain decoding."""
        plain = sum(self.plain.seconds.values()) / self.plain.tokens
        return self.tokens(length) * plain / self.step(length)

    @property
    def predicted(self) -> tuple[float, ...]:
        """Of lengths 1, 2, ..."""
        return tuple(self.speedup(length) for length in range(1, len(self.nodes)))

    @property
    def best(self) -> int:
        """The draft length that promises most."""
        return 1 + self.predicted.index(max(self.predicted))

    @property
    def textbook(self) -> float | None:
        """Leviathan et al.'s (2023) formula at the best length; None where a draft is no chain."""
        if self.cost_ratio is None or not self.chain:
            return None
        return textbook_speedup(self.acceptance, self.best, self.cost_ratio)


@dataclass(frozen=True)
class SpeedupTrial:
    """``measured``: the speedup at the best draft length, the median over prompts."""

    explored: Exploration
    measured: float
    seconds: float

    def record(self) -> dict[str, Any]:
        found = self.explored
        curve = zip(found.target.tokens, found.target.seconds, strict=True)
        return {
            "plain_tokens_per_second": found.plain.rate,
            "acceptance_rate": found.acceptance,
            "acceptance_per_position": list(found.per_position),
            "drafts_per_position": list(found.long.reached),
            "draft_cost_ratio": found.cost_ratio,
            "target_seconds_by_rows": [{"rows": r, "seconds": s} for r, s in curve],
            "predicted_speedup_by_length": list(found.predicted),
            "best_draft_length": found.best,
            "predicted_speedup": found.speedup(found.best),
            "textbook_speedup": found.textbook,
            "measured_speedup": self.measured,
            "seconds": self.seconds,
        }


def run_trial(
    plain: LLM,
    spec: LLM,
    seconds: float = SECONDS,
    progress: Callable[[float], None] = lambda passed: None,
) -> SpeedupTrial:
    """Measure a pair for about ``seconds``, greedily, one sequence at a time.

    ``spec`` decodes with the draft, at fixed lengths. ``progress``
    hears the seconds that have passed. At least one prompt is decoded in each way, however long
    that takes. Text beyond the first 256 tokens of a prompt is left out.
    """
    start = time.perf_counter()
    most = max(1, min(_PROMPT_TOKENS, plain.max_model_len // 2))
    prompts = [prompt.encode(plain)[:most] for prompt in load_prompts(per_category=1)]

    def turn(ids: list[int], tokens: int, *lengths: int) -> list[TrialCounts]:
        found = []
        for length in lengths:
            found.append(decode(spec if length else plain, ids, tokens, length))
            progress(time.perf_counter() - start)
        return found

    warm = turn(prompts[0], _LEAST_TOKENS, 0, LONG, _SHORT)[0]
    # Each prompt is decoded in three ways, and three prompts at least should have their turn.
    affordable = max(_LEAST_TOKENS, int(_EXPLORE * seconds * warm.rate / 9))
    tokens = max(1, min(_MOST_TOKENS, affordable, plain.max_model_len - most - 1))
    explored = [
        turn(ids, tokens, 0, LONG, _SHORT) for ids in _until(prompts, start + _EXPLORE * seconds)
    ]
    base, long, short = (sum(column[1:], column[0]) for column in zip(*explored, strict=True))
    drafter, lengths = spec.engine.drafter, range(LONG + 1)
    found = Exploration(
        base,
        long,
        short,
        tuple(drafter.passes(length) for length in lengths),
        tuple(drafter.max_nodes(length) for length in lengths),
    )
    pairs = [turn(ids, tokens, 0, found.best) for ids in _until(prompts, start + seconds)]
    measured = statistics.median(fast.rate / slow.rate for slow, fast in pairs)
    return SpeedupTrial(found, measured, time.perf_counter() - start)


def _until(prompts: Sequence[list[int]], deadline: float) -> Iterator[list[int]]:
    """One prompt after the other, at least one, until the time is up."""
    for number, ids in enumerate(itertools.cycle(prompts)):
        if number and time.perf_counter() >= deadline:
            return
        yield ids


def decode(llm: LLM, ids: Sequence[int], tokens: int, length: int) -> TrialCounts:
    """Decode greedily, past end tokens; the clock starts behind the step that reads the prompt."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True, draft_length=length)
    drive = Drive(llm.engine, [sequence(ids, params)]).run()
    read = next(place for place, step in enumerate(drive.steps) if step.commits[0].tokens)
    sums = StepSums.of(drive.steps[read + 1 :])
    return TrialCounts(
        tokens=sums.tokens,
        steps=sums.steps,
        seconds=dict(sums.seconds),
        nodes=sums.drafted,
        reached=sums.reached,
        accepted=sums.accepted_at,
    )


def _sums(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(one, other, fillvalue=0))
