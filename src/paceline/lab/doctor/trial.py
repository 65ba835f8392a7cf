"""Ten seconds of decoding with a loaded pair: what acceptance and costs promise, and what comes.

Plain decoding and drafts of a fixed length take turns on the shipped prompts. From the steps' own
clock follow the target's time by rows, the drafter's by pass, and the chance that a step gains
token i of a draft; these predict the speedup of every length, and the best one is then run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, StepSums, sequence
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.doctor.findings import Finding, finding
from paceline.lab.prediction import best_length, predicted_by_measured, speedup
from paceline.llm import LLM

_DRAFTER = "drafter"  # its name in the cost model
SECONDS = 10.0  # of measuring, by default
LONG = 8  # the draft length of the exploration
_EXPLORE = 0.6  # of the seconds; the rest confirms
_MOST_TOKENS, _LEAST_TOKENS, _PROMPT_TOKENS = 64, LONG + 2, 256


@dataclass(frozen=True)
class SpeedupTrial:
    """Plain decoding, and that with drafts of ``LONG`` tokens, on the same prompts: steps that only
    decode, the one that reads the prompt is left out.

    ``passes[g]`` and ``nodes[g]``: the drafter's forwards for a draft of g tokens, and its most
    nodes. ``measured_speedup``: at the best draft length, the median over prompts.
    """

    plain: StepSums
    long: StepSums
    passes: tuple[int, ...]
    nodes: tuple[int, ...]
    measured_speedup: float = 0.0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Of the drafted tokens that were tried, the share that was accepted; None without any."""
        return self.long.acceptance if self.long.drafted else None

    @property
    def chain(self) -> bool:
        """Whether every draft is a chain of as many tokens as were asked for."""
        return self.passes[-1] == self.nodes[-1] == len(self.nodes) - 1

    @property
    def pass_seconds(self) -> float:
        """Of one pass of the drafter."""
        made = self.long.drafted if self.chain else self.passes[-1] * self.long.steps
        return self.long.seconds["draft"] / max(1, made)

    @property
    def draft_cost_ratio(self) -> float | None:
        """One pass of the drafter over one plain target forward; None if it takes none."""
        if not self.passes[-1]:
            return None
        return self.pass_seconds / self.plain.mean_seconds("target")

    def by_rows(self, *phases: str) -> CostCurve:
        """Seconds of these phases by the rows of the target's forward, which are means over steps
        and rounded."""
        plain, rows = (
            self.plain.mean_seconds(*phases),
            round(1 + self.long.drafted / self.long.steps),
        )
        if rows == 1:
            return CostCurve((1,), (plain,))
        return CostCurve((1, rows), (plain, max(plain, self.long.mean_seconds(*phases))))

    @cached_property
    def cost(self) -> CostModel:
        """What steps take and gain, from the phases of those that were run."""
        # Lookup drafters do not always find something: as many nodes as they did.
        share = self.long.drafted / self.long.steps / max(1, self.nodes[-1])
        nodes = tuple(count * (1.0 if self.chain else share) for count in self.nodes)
        costs = DrafterCosts(nodes, self.passes, CostCurve((1,), (self.pass_seconds,)))
        # What takes no pass is part of the rest of a step that has drafts.
        looking = ["draft"] if costs.costless else []
        rest = self.by_rows("target", "verify", "other", *looking)
        cost = CostModel(TargetCosts((1,), (rest,)), {_DRAFTER: costs})
        accepted, rates = self.long.accepted_at, self.long.rates
        if not self.chain:  # else shorter ones were cut by the request's end
            pairs = zip(accepted, (self.long.steps, *accepted), strict=False)
            rates = tuple(after / before if before else 0.0 for after, before in pairs)
        cost.acceptance.everyone(_DRAFTER).know(rates)
        return cost

    @property
    def predicted_speedup_by_length(self) -> list[float]:
        """Over plain decoding, of lengths 1, 2, ..."""
        return [speedup(self.cost, _DRAFTER, length) for length in range(1, len(self.nodes))]

    @property
    def best_draft_length(self) -> int:
        """The one that promises most."""
        return best_length(self.cost, _DRAFTER)

    @property
    def predicted_speedup(self) -> float:
        """At the best length."""
        return speedup(self.cost, _DRAFTER, self.best_draft_length)

    @property
    def predicted_by_measured(self) -> float:
        """1.1 promises 10 % too much."""
        return predicted_by_measured(self.predicted_speedup, self.measured_speedup)


def run_trial(
    plain: LLM,
    spec: LLM,
    seconds: float = SECONDS,
    progress: Callable[[float], None] = lambda passed: None,
) -> SpeedupTrial:
    """Measure a pair for about ``seconds``, greedily, one sequence at a time.

    ``spec`` decodes with the draft, at fixed lengths. ``progress`` is told the seconds that have
    passed. At least one prompt is decoded in each way, however long that takes. Text beyond the
    first 256 tokens of a prompt is left out.
    """
    start = time.perf_counter()
    most = max(1, min(_PROMPT_TOKENS, plain.max_model_len // 2))
    prompts = [prompt.encode(plain)[:most] for prompt in load_prompts(per_category=1)]

    def turn(ids: list[int], tokens: int, length: int) -> tuple[StepSums, StepSums]:
        """Plain decoding and that with drafts."""
        both = []
        for llm, levels in ((plain, 0), (spec, length)):
            both.append(_decode(llm, ids, tokens, levels))
            progress(time.perf_counter() - start)
        return both[0], both[1]

    warm, _ = turn(prompts[0], _LEAST_TOKENS, LONG)
    # Each prompt is decoded in two ways, and three prompts at least should have their turn.
    affordable = max(_LEAST_TOKENS, int(_EXPLORE * seconds * warm.rate / 6))
    tokens = max(1, min(_MOST_TOKENS, affordable, plain.max_model_len - most - 1))
    explored = [turn(ids, tokens, LONG) for ids in _until(prompts, start + _EXPLORE * seconds)]
    base, long = (sum(column[1:], column[0]) for column in zip(*explored, strict=True))
    drafter, lengths = spec.engine.drafter, range(LONG + 1)
    passes = tuple(drafter.passes(length) for length in lengths)
    trial = SpeedupTrial(base, long, passes, tuple(drafter.max_nodes(n) for n in lengths))
    best = trial.best_draft_length
    pairs = [turn(ids, tokens, best) for ids in _until(prompts, start + seconds)]
    measured = statistics.median(fast.rate / slow.rate for slow, fast in pairs)
    return replace(trial, measured_speedup=measured, seconds=time.perf_counter() - start)


def _until(prompts: Sequence[list[int]], deadline: float) -> Iterator[list[int]]:
    """One prompt after the other, at least one, until the time is up."""
    for number, ids in enumerate(itertools.cycle(prompts)):
        if number and time.perf_counter() >= deadline:
            return
        yield ids


def _decode(llm: LLM, ids: Sequence[int], tokens: int, length: int) -> StepSums:
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


def judge(trial: SpeedupTrial) -> Iterator[Finding]:
    """The verdict first, then what stands in the way."""
    measured, predicted = trial.measured_speedup, trial.predicted_speedup
    ratio, rate = trial.draft_cost_ratio, trial.acceptance_rate
    accepted = "no draft was tried" if rate is None else f"{rate:.0%} accepted"
    text = (
        f"measured {measured:.2f}x of plain decoding at draft length {trial.best_draft_length}, "
        f"predicted {predicted:.2f}x; {accepted}"
    )
    code = "not-worth-it"
    if measured >= _HARMLESS:
        code = "worth-it" if measured >= _WORTH else "barely-worth-it"
    yield finding(code, text)
    if not 1 / _UNSURE <= trial.predicted_by_measured <= _UNSURE:
        yield finding("measurement-unsure", predicted=predicted, measured=measured)
    if ratio is not None and rate is not None and rate < _LOW:
        yield finding("acceptance-low", rate=rate)
    if ratio is not None and ratio > _DEAR:
        yield finding("draft-dear", ratio=ratio)
    curve = trial.by_rows("target")
    growth = curve(_ROWS) / curve(1)
    if growth > _STEEP:
        yield finding("verify-dear", rows=_ROWS, growth=growth)
