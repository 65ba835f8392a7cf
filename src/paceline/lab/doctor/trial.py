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
from typing import Any

from paceline.control.cost import CostModel, predicted_by_measured, textbook_speedup
from paceline.control.options import DrafterCosts
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, StepSums, sequence
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.doctor.findings import Finding, finding
from paceline.llm import LLM

_DRAFTER, _REPEATED = "drafter", 100  # its name in the cost model; times to show it a step
SECONDS = 10.0  # of measuring, by default
LONG, _SHORT = 8, 2  # draft lengths of the exploration
_EXPLORE = 0.6  # of the seconds; the rest confirms
_MOST_TOKENS, _LEAST_TOKENS, _PROMPT_TOKENS = 64, LONG + 2, 256


@dataclass(frozen=True)
class Exploration:
    """Plain decoding, and that with drafts of ``LONG`` and of fewer tokens, on the same prompts:
    steps that only decode, the one that reads the prompt is left out.

    ``passes[g]`` and ``nodes[g]``: the drafter's forwards for a draft of g tokens, and its most
    nodes.
    """

    plain: StepSums
    long: StepSums
    short: StepSums
    passes: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        """Of the drafted tokens that were tried, the share that was accepted."""
        return self.long.acceptance

    @property
    def accepted(self) -> str:
        """In words; what drafted nothing had nothing accepted or refused."""
        return f"{self.acceptance:.0%} accepted" if self.long.drafted else "no draft was tried"

    @property
    def per_position(self) -> tuple[float, ...]:
        """Conditional: given that all tokens before were accepted."""
        return self.long.rates

    @property
    def cost_ratio(self) -> float | None:
        """One pass of the drafter over one plain target forward; None if it takes none."""
        return self._pass / self.plain.mean_seconds("target") if self.passes[-1] else None

    @property
    def _pass(self) -> float:
        """Seconds of one pass of the drafter."""
        made = self.long.drafted if self.chain else self.passes[-1] * self.long.steps
        return self.long.seconds["draft"] / max(1, made)

    @cached_property
    def target(self) -> CostCurve:
        """Seconds of a target forward by its rows, which are means over steps and rounded."""
        return self._by_rows("target")

    def _by_rows(self, *phases: str) -> CostCurve:
        points = {1: self.plain.mean_seconds(*phases)}
        for decoded in (self.short, self.long):
            rows = round(1 + decoded.drafted / decoded.steps)
            if rows > max(points):
                points[rows] = max(decoded.mean_seconds(*phases), max(points.values()))
        return CostCurve(tuple(points), tuple(points.values()))

    @property
    def chain(self) -> bool:
        """Whether every draft is a chain of as many tokens as were asked for."""
        return self.passes[-1] == self.nodes[-1] == len(self.nodes) - 1

    @cached_property
    def cost(self) -> CostModel:
        """What steps take and gain, from the phases of those that were run."""
        # Lookup drafters do not always find something: as many nodes as they did.
        nodes_used = self.long.drafted / self.long.steps / max(1, self.nodes[-1])
        nodes = tuple(count * (1.0 if self.chain else nodes_used) for count in self.nodes)
        profile = DrafterCosts(nodes, self.passes, CostCurve((1,), (self._pass,)))
        rest = self._by_rows("target", "verify", "other")
        cost = CostModel(TargetCosts((1,), (rest,)), {_DRAFTER: profile})
        rates: Sequence[float] = self.per_position  # shorter ones were cut by the request's end
        if not self.chain:
            pairs = zip(
                self.long.accepted_at, (self.long.steps, *self.long.accepted_at), strict=False
            )
            rates = [after / before if before else 0.0 for after, before in pairs]
        cost.acceptance.everyone(_DRAFTER).know(rates)
        if profile.costless:
            drafting = self.long.mean_seconds("draft")
            mean = round(self.long.drafted / self.long.steps)
            for _ in range(_REPEATED):
                seconds = drafting + cost.verify(1, mean)
                cost.learn(1, mean, seconds, drafting, passes={_DRAFTER: 0.0})
        return cost

    def tokens(self, length: int) -> float:
        """Expected in a step: the target's own, and each drafted one by how often it was gained."""
        return self.cost.tokens(_DRAFTER, length)

    def step(self, length: int) -> float:
        """Seconds of a step with drafts of ``length`` tokens."""
        return self.cost.table(_DRAFTER, 1)[length]

    def speedup(self, length: int) -> float:
        """Predicted, over plain decoding."""
        return self.cost.speedup(_DRAFTER, length)

    @property
    def predicted(self) -> tuple[float, ...]:
        """Of lengths 1, 2, ..."""
        return tuple(self.speedup(length) for length in range(1, len(self.nodes)))

    @property
    def best(self) -> int:
        """The draft length that promises most."""
        return self.cost.best_length(_DRAFTER)

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

    @property
    def predicted_by_measured(self) -> float:
        """1.1 promises 10 % too much."""
        return predicted_by_measured(self.explored.speedup(self.explored.best), self.measured)

    def record(self) -> dict[str, Any]:
        explored = self.explored
        curve = zip(explored.target.tokens, explored.target.seconds, strict=True)
        return {
            "plain_tokens_per_second": explored.plain.rate,
            "acceptance_rate": explored.acceptance if explored.long.drafted else None,
            "acceptance_per_position": list(explored.per_position),
            "drafts_per_position": list(explored.long.reached),
            "draft_cost_ratio": explored.cost_ratio,
            "target_seconds_by_rows": [{"rows": r, "seconds": s} for r, s in curve],
            "predicted_speedup_by_length": list(explored.predicted),
            "best_draft_length": explored.best,
            "predicted_speedup": explored.speedup(explored.best),
            "textbook_speedup": explored.textbook,
            "measured_speedup": self.measured,
            "predicted_by_measured": self.predicted_by_measured,
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

    def turn(ids: list[int], tokens: int, *lengths: int) -> list[StepSums]:
        explorations = []
        for length in lengths:
            explorations.append(decode(spec if length else plain, ids, tokens, length))
            progress(time.perf_counter() - start)
        return explorations

    warm = turn(prompts[0], _LEAST_TOKENS, 0, LONG, _SHORT)[0]
    # Each prompt is decoded in three ways, and three prompts at least should have their turn.
    affordable = max(_LEAST_TOKENS, int(_EXPLORE * seconds * warm.rate / 9))
    tokens = max(1, min(_MOST_TOKENS, affordable, plain.max_model_len - most - 1))
    explored = [
        turn(ids, tokens, 0, LONG, _SHORT) for ids in _until(prompts, start + _EXPLORE * seconds)
    ]
    base, long, short = (sum(column[1:], column[0]) for column in zip(*explored, strict=True))
    drafter, lengths = spec.engine.drafter, range(LONG + 1)
    exploration = Exploration(
        base,
        long,
        short,
        tuple(drafter.passes(length) for length in lengths),
        tuple(drafter.max_nodes(length) for length in lengths),
    )
    pairs = [turn(ids, tokens, 0, exploration.best) for ids in _until(prompts, start + seconds)]
    measured = statistics.median(fast.rate / slow.rate for slow, fast in pairs)
    return SpeedupTrial(exploration, measured, time.perf_counter() - start)


def _until(prompts: Sequence[list[int]], deadline: float) -> Iterator[list[int]]:
    """One prompt after the other, at least one, until the time is up."""
    for number, ids in enumerate(itertools.cycle(prompts)):
        if number and time.perf_counter() >= deadline:
            return
        yield ids


def decode(llm: LLM, ids: Sequence[int], tokens: int, length: int) -> StepSums:
    """Decode greedily, past end tokens; the clock starts behind the step that reads the prompt."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True, draft_length=length)
    drive = Drive(llm.engine, [sequence(ids, params)]).run()
    read = next(index for index, step in enumerate(drive.steps) if step.commits[0].tokens)
    return StepSums.of(drive.steps[read + 1 :])


VERDICTS = ("worth-it", "barely-worth-it", "not-worth-it")
_WORTH, _HARMLESS = 1.1, 0.97  # speedups from which a draft helps, and does no harm
_UNSURE = 1.25  # between prediction and measurement, either way
_LOW = 0.4  # acceptance
_DEAR = 1 / 3  # of a target forward, for one pass of the drafter
_ROWS, _STEEP = 5, 1.5  # so many rows should cost less than so many times one


def judge(trial: SpeedupTrial) -> list[Finding]:
    """The verdict first, then what stands in the way."""
    explored = trial.explored
    best, predicted = explored.best, explored.speedup(explored.best)
    text = (
        f"measured {trial.measured:.2f}x of plain decoding at draft length {best}, predicted "
        f"{predicted:.2f}x; {explored.accepted}"
    )
    code = "not-worth-it"
    if trial.measured >= _HARMLESS:
        code = "worth-it" if trial.measured >= _WORTH else "barely-worth-it"
    findings = [finding(code, "pair", text)]
    if not 1 / _UNSURE <= trial.predicted_by_measured <= _UNSURE:
        text = f"predicted {predicted:.2f}x, measured {trial.measured:.2f}x"
        findings.append(finding("measurement-unsure", "machine", text))
    ratio = explored.cost_ratio
    if ratio is not None and explored.long.drafted and explored.acceptance < _LOW:
        text = f"of the drafted tokens that were tried {explored.acceptance:.0%} were accepted"
        findings.append(finding("acceptance-low", "pair", text))
    if ratio is not None and ratio > _DEAR:
        text = f"a pass of the drafter takes {ratio:.2f} of a target forward"
        findings.append(finding("draft-dear", "pair", text))
    growth = explored.target(_ROWS) / explored.target(1)
    if growth > _STEEP:
        text = f"a target forward over {_ROWS} rows takes {growth:.2f} times one over one row"
        findings.append(finding("verify-dear", "machine", text))
    return findings
