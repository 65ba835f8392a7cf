"""Predicted against measured: on made-up runs, and on the real engine in simulated time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.control.acceptance import expected_tokens
from paceline.control.cost import CostModel
from paceline.core.batch import Batch, ModelOutput
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.draft.base import LookupDrafter
from paceline.engine.alone import measure_alone
from paceline.lab.bench.engines import Paceline
from paceline.lab.bench.methods import PLAIN as PLAIN_NAME
from paceline.lab.bench.methods import Method
from paceline.lab.bench.predict import MeanDraft, Prediction, predict, predictions
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.bench.runner import take_turns, warm_up
from paceline.lab.bench.runs import Ask, BenchJob, HeatRecord, TimedAnswer, TimedRun
from paceline.model.target import CausalModel
from support.made_outcomes import sums

# Milliseconds. The draft's pass is a tenth of a target forward, verification nearly free.
PLAIN = {"draft": 0.0, "target": 10.0, "verify": 0.5, "other": 0.5}


def alone(check: float = 6.0) -> CostModel:
    """Forwards of 5 over one token and ``check`` over four, passes of 0.5: the machine was twice as
    fast."""
    curve = CostCurve((1, 4), (5.0, check))
    profile = DrafterCosts((0, 3), (0, 1), CostCurve((1,), (0.5,)))
    return CostModel(TargetCosts((1, 8), (curve, curve)), {"drafter": profile})


# What the formula makes of it: three passes, the larger forward, more rows to judge.
SPEC = {"draft": 3.0, "target": 12.0, "verify": 0.75, "other": 0.5}
# 100 drafts of three tokens: 80 had the first one accepted, 60 of these the second, 30 the third.
REACHED, ACCEPTED = [100, 80, 60], [80, 60, 30]
COUNTS = [1] * 20 + [2] * 20 + [3] * 30 + [4] * 30
EXPECTED = 2.7


class Chains(LookupDrafter):
    """Chains of any length, a pass a token."""

    def max_nodes(self, length: int) -> int:
        return length

    def passes(self, length: int) -> int:
        return length


class Lookup(LookupDrafter):
    """Chains without any pass."""

    def max_nodes(self, length: int) -> int:
        return length


def run(
    counts: list[int], phases: dict[str, float], beside: float = 0.0, **figures: object
) -> TimedRun:
    """A request whose steps gained so many tokens; all of them only decoded."""
    answer = TimedAnswer((7,) * sum(counts), tuple((0.0, count) for count in counts))
    steps = len(counts)
    total = {phase: steps * seconds for phase, seconds in phases.items()}
    whole = sum(total.values()) + beside
    return replace(TimedRun([answer], whole, steps, decoding=sums(steps, total)), **figures)  # type: ignore[arg-type]


def plain_run(beside: float = 0.0) -> TimedRun:
    return run([1] * 270, PLAIN, beside, drafted=0)


def spec_run(beside: float = 0.0, **phases: float) -> TimedRun:
    figures = {
        "drafted": 300,
        "levels": 300,
        "accepted": 170,
        "reached": REACHED,
        "accepted_at": ACCEPTED,
    }
    return run(COUNTS, {**SPEC, **phases}, beside, **figures)


def made_of(
    plain: list[TimedRun], rounds: list[TimedRun], drafts: MeanDraft, cost: CostModel
) -> Prediction:
    made = predict("fast", 1, plain, rounds, drafts, cost)
    assert made is not None
    return made


def prediction(spec: TimedRun, plain: TimedRun | None = None) -> Prediction:
    return made_of([plain or plain_run()], [spec], MeanDraft.of(Chains(), [spec]), alone())


# -- the formulas --------------------------------------------------------------------------------


def test_expected_tokens() -> None:
    assert expected_tokens([]) == [1.0]
    assert expected_tokens([0.8, 0.75, 0.5])[-1] == pytest.approx(EXPECTED)
    assert expected_tokens([0.5] * 3)[-1] == pytest.approx((1 - 0.5**4) / (1 - 0.5))


def textbook_speedup(rate: float, length: float, cost: float) -> float:
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), Leviathan et al. 2023, theorem 3.8.

    One acceptance ``rate`` a for all positions, drafts of g tokens, and a drafter whose pass
    takes ``cost`` c of a target forward. Verifying g + 1 tokens is taken to cost what one does.
    """
    return (1 - rate ** (length + 1)) / (1 - rate) / (length * cost + 1)


def test_without_overheads_both_formulas_agree() -> None:
    """Equal rates, verification for nothing and no bookkeeping are what the textbook assumes."""
    rates = MeanDraft(3, 3, 3, rates=(0.6,) * 3)
    forward = {"draft": 0.0, "target": 10.0, "verify": 0.0, "other": 0.0}
    made = made_of([run([1] * 9, forward)], [run([3] * 3, forward)], rates, alone(5.0))
    assert made.predicted == pytest.approx(textbook_speedup(0.6, 3, 0.1))


# -- the difference ------------------------------------------------------------------------------


def test_a_run_as_predicted() -> None:
    made = prediction(spec_run())
    assert made.predicted == pytest.approx(EXPECTED * 11 / 16.25)
    assert made.tokens_per_step == pytest.approx(EXPECTED)
    assert (made.plain_step, made.step, made.measured_step) == pytest.approx((11, 16.25, 16.25))
    assert (made.decoding, made.measured) == pytest.approx((made.predicted,) * 2)
    assert made.record()["predicted_by_measured"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("phase", "seconds"), [("draft", 4.0), ("target", 15.0), ("target", 11.0), ("other", 1.75)]
)
def test_an_overhead_is_in_the_measured_step_only(phase: str, seconds: float) -> None:
    made = prediction(spec_run(**{phase: seconds}))
    more = seconds - SPEC[phase]
    assert made.step == pytest.approx(16.25)
    assert made.measured_step == pytest.approx(16.25 + more)
    speedup = EXPECTED * 11 / (16.25 + more)
    assert (made.decoding, made.measured) == pytest.approx((speedup, speedup))
    assert made.predicted_by_measured == pytest.approx((16.25 + more) / 16.25)


def test_reading_prompts_dilutes_the_speedup() -> None:
    made = prediction(spec_run(beside=500.0), plain_run(beside=500.0))
    assert made.decoding == pytest.approx(made.predicted)
    assert made.measured == pytest.approx((270 * 11 + 500) / (100 * 16.25 + 500))


def test_rounds_are_joined_by_their_median() -> None:
    hiccup = spec_run(beside=90.0, draft=50.0, target=90.0, other=30.0)
    rounds = [spec_run(), hiccup, spec_run()]
    made = made_of([plain_run()] * 3, rounds, MeanDraft.of(Chains(), rounds), alone())
    assert made.measured == pytest.approx(prediction(spec_run()).measured)
    assert made.measured_step == pytest.approx(16.25)


def test_runs_that_had_fewer_requests_left_are_made_comparable() -> None:
    """With two of four sequences in flight a step as dear gains half as much."""
    plain, spec = plain_run(), spec_run()
    plain = replace(plain, decoding=replace(plain.decoding, sequences=4 * 270))
    spec = replace(spec, decoding=replace(spec.decoding, sequences=2 * 100))
    assert prediction(spec, plain).predicted == pytest.approx(EXPECTED * 11 / 16.25 / 2)


def test_runs_that_never_only_decoded_predict_nothing() -> None:
    drafts = MeanDraft.of(Chains(), [spec_run()])
    nothing = sums(0, dict.fromkeys(PLAIN, 0.0))
    for plain, spec in (
        (plain_run(), replace(spec_run(), decoding=nothing)),
        (replace(plain_run(), decoding=nothing), spec_run()),
    ):
        assert predict("fast", 1, [plain], [spec], drafts, alone()) is None


# -- drafts --------------------------------------------------------------------------------------


def test_drafts_of_a_fixed_length() -> None:
    drafts = MeanDraft.of(Chains(), [spec_run(), spec_run()])
    assert (drafts.levels, drafts.nodes, drafts.passes) == (3, 3, 3)
    assert drafts.rates == pytest.approx((0.8, 0.75, 0.5))


def test_drafts_of_an_adaptive_length_count_what_was_not_drafted() -> None:
    """Half of the steps draft two tokens, a quarter drafts one, a quarter none."""
    counts = [3] * 30 + [2] * 30 + [1] * 40
    figures = {
        "drafted": 125,
        "levels": 125,
        "accepted": 90,
        "reached": [75, 40],
        "accepted_at": [60, 30],
    }
    spec = run(counts, SPEC, **figures)
    drafts = MeanDraft.of(Chains(), [spec])
    assert (drafts.levels, drafts.nodes, drafts.passes) == pytest.approx((1.25, 1.25, 1.25))
    assert expected_tokens(drafts.rates)[-1] == pytest.approx(spec.tokens / spec.steps)
    made = made_of([plain_run()], [spec], drafts, alone())
    assert made.tokens_per_step == pytest.approx(spec.tokens / spec.steps)


def test_a_lookup_that_finds_little_is_not_taken_for_one_that_was_cut_short() -> None:
    figures = {
        "drafted": 60,
        "levels": 60,
        "accepted": 20,
        "reached": [20, 5],
        "accepted_at": [15, 5],
    }
    spec = run([3] * 5 + [2] * 10 + [1] * 85, SPEC, **figures)
    drafts = MeanDraft.of(Lookup(), [spec])
    assert drafts.passes == 0
    assert expected_tokens(drafts.rates)[-1] == pytest.approx(1.2)


# -- on a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline/tiny", draft="none", max_batch_size=2)


@pytest.fixture(scope="module")
def spec(plain: LLM) -> LLM:
    return plain.beside("paceline/tiny-draft", draft_length=4, max_batch_size=2)


def test_measuring_forwards_leaves_no_trace(spec: LLM) -> None:
    cache = spec.engine.cache
    before = cache.pool.available
    cost = measure_alone(spec.engine, 2.5, 1, 2, context=50)
    assert cache.pool.available == before
    assert not spec.engine.has_work
    assert cost.verify(1, 0) > 0 and 0 < cost.verify(2, 0) <= cost.verify(2, 2.5)
    assert cost.passes("drafter", [1, 1]) > 0


def test_contexts_and_batches_beyond_the_cache_are_cut(plain: LLM) -> None:
    cost = measure_alone(plain.engine, 40, 64, 64, context=10**6)
    assert cost.verify(64, 40) > 0
    assert cost.passes("drafter", [1] * 64) == 0


def test_a_machine_without_overheads_runs_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine in simulated time: only forwards take any, so much each and so much a row.
    The figures are those of two texts: float32, where a processor's rounding turns no choice."""
    plain = LLM(
        "paceline/tiny", draft="none", max_batch_size=2, backend="reference", dtype="float32"
    )
    spec = plain.beside("paceline/tiny-draft", draft_length=4, max_batch_size=2)
    now = 0.0
    call = CausalModel.__call__

    def timed(self: CausalModel, batch: Batch, *rest: Any, **named: Any) -> ModelOutput:
        nonlocal now
        rows = len(batch.input_ids)
        now += 10.0 + 0.5 * rows if self is plain.target else 1.0 + 0.1 * rows
        return call(self, batch, *rest, **named)

    monkeypatch.setattr(CausalModel, "__call__", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = [prompt.encode(plain) for prompt in load_prompts(None, ["arithmetic", "code"], 1)]
    jobs = [BenchJob("a", 1, 0.0, n, (Ask(tuple(p), params),)) for n, p in enumerate(prompts)]
    engines = [
        Paceline(Method(PLAIN_NAME), lambda: plain, 1),
        Paceline(Method("speculative", "paceline/tiny-draft", 4), lambda: spec, 1),
    ]
    record = HeatRecord()
    warm_up(jobs, engines)
    take_turns(jobs, engines, 1, record)
    (made,) = predictions(record, engines, 1, 0.0)
    assert (made.method, made.concurrency) == ("speculative", 1)
    assert made.plain_step == pytest.approx(10.5)
    # Over all steps: those that end a request draft less than four tokens. After a full draft the
    # draft model has two tokens to read, 0.1 s each.
    assert made.step == pytest.approx(4 * 1.1 + 12.5, rel=0.01)
    assert made.measured_step == pytest.approx(made.step, rel=0.02)
    assert 1.5 < made.tokens_per_step <= 5
    assert made.decoding == pytest.approx(made.predicted, rel=0.05)
    assert made.predicted_by_measured == pytest.approx(1, rel=0.1)
