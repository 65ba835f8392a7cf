"""A benchmark that ends early: whole jobs only, spread over the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from paceline.lab.bench.prompts import interleave
from paceline.lab.bench.result import rows
from paceline.lab.bench.runner import (
    BenchEngine,
    BenchRequest,
    JobResult,
    Method,
    Sweep,
    TimedRun,
    spending_of,
    take_turns,
)
from paceline.lab.budget import Budget
from support.made_outcomes import Fake, job, job_result
from support.simulated_clock import Clock

PROMPTS = [("chat", [1, 2]), ("chat", [3]), ("code", [4, 5, 6]), ("code", [7])]


@dataclass
class Timed(Fake):
    """Takes ten seconds per request on a simulated clock; warm-ups take no time."""

    clock: Clock = field(default_factory=Clock)

    def run(self, requests: Sequence[BenchRequest]) -> TimedRun:
        if requests[0].params.max_tokens > 16:
            self.clock.now += 10 * len(requests)
        return super().run(requests)


def opened_all(clock: Clock) -> list[BenchEngine]:
    return [Timed(name, clock=clock) for name in ("plain", "ngram")]


def work() -> list:
    return Sweep(64).jobs(PROMPTS, 1)


def test_no_job_is_begun_after_the_time() -> None:
    clock, record = Clock(), list[JobResult]()
    take_turns(work(), opened_all(clock), 3, record, budget=Budget(40, clock))
    assert clock.now == 40
    assert [(h.round_index, h.job.index) for h in record] == [(0, 0), (0, 2)]  # a chat and code
    assert all(list(h.runs) == ["plain", "ngram"] for h in record)


def test_a_second_round_is_begun_only_whole() -> None:
    clock, record = Clock(), list[JobResult]()
    take_turns(work(), opened_all(clock), 3, record, budget=Budget(150, clock))
    assert [h.round_index for h in record] == [0, 0, 0, 0]
    clock, record = Clock(), list[JobResult]()
    take_turns(work(), opened_all(clock), 3, record, budget=Budget(180, clock))
    assert [h.round_index for h in record] == [0] * 4 + [1] * 4


def test_categories_and_temperatures_take_turns() -> None:
    assert interleave("aabbbc", lambda letter: letter) == list("abcabb")
    jobs = Sweep(8, temperature=[0.0, 1.0]).jobs(PROMPTS, 1)
    assert [(j.temperature, j.category, j.index) for j in jobs[:4]] == [
        (0.0, "chat", 0),
        (0.0, "code", 2),
        (1.0, "chat", 0),
        (1.0, "code", 2),
    ]
    assert len(jobs) == 8


def test_crowds_shrink_to_two_requests_a_client_within_a_budget() -> None:
    many = [("chat", [n]) for n in range(1, 41)]
    (whole,) = Sweep(8).jobs(many, 4)
    (time_limited,) = Sweep(8).jobs(many, 4, time_limited=True)
    assert [len(job.requests) for job in (whole, time_limited)] == [40, 8]


def test_every_concurrency_has_its_share() -> None:
    clock, record = Clock(), list[JobResult]()
    methods = [Method("plain"), Method("ngram", "ngram")]
    sweep = Sweep(64, [1, 2], rounds=9)
    assert sweep.wanted(PROMPTS) == 5
    sweep.run(
        PROMPTS,
        methods,
        lambda method, clients: Timed(method.name, clock=clock),
        record,
        budget=Budget(400, clock),
    )
    assert clock.now <= 400
    assert {h.job.concurrency for h in record} == {1, 2}


def test_the_interval_is_judged_by_how_prompts_differ() -> None:
    def interval(*seconds: float) -> tuple[float, float] | None:
        job_results = [
            job_result(0, job(index=n), plain=2.0, fast=s) for n, s in enumerate(seconds)
        ]
        plain, fast = rows(job_results)
        assert plain.interval is None
        return fast.interval

    assert interval(*[1.0] * 6) == pytest.approx((2.0, 2.0))
    ends = interval(1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
    assert ends is not None and 1.0 <= ends[0] < 4 / 3 < ends[1] <= 2.0
    assert interval(1.0, 2.0, 1.0) is None  # too few


def test_what_the_time_was_spent_on_is_said() -> None:
    record = [job_result(0, job(index=n), plain=2.0, fast=1.0) for n in range(6)]
    prompts = [("chat", [1, 2])] * 8
    spending = spending_of(record, Sweep(8, [1, 4], rounds=3), prompts, Budget(120, Clock()))
    done = "0 s completed 6 of 27 turns of all methods. Not measured: 4 at once, temperature 0."
    assert spending.line == f"{done} More --seconds measure the rest."
    assert replace(spending, seconds=None).line == done  # it was interrupted
