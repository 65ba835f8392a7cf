"""Figures, exact, from outcomes made by hand."""

from __future__ import annotations

import pytest

from paceline.lab.bench.result import OVERALL, idle, percentile, rows
from paceline.lab.bench.runner import JobResult, take_turns
from paceline.lab.report.document import Spread
from support.made_outcomes import Fake, job, job_result, outcome


def test_rates_and_speedups() -> None:
    job_results = [  # every outcome has 4 tokens
        job_result(0, job(), plain=2.0, fast=1.0),
        job_result(1, job(), plain=1.0, fast=1.0),
        job_result(2, job(), plain=4.0, fast=1.0),
    ]
    plain, fast = rows(job_results)
    assert plain.tokens_per_second == Spread(2.0, 1.0, 4.0)
    assert fast.tokens_per_second == Spread(4.0, 4.0, 4.0)
    assert plain.speedup == Spread(1.0, 1.0, 1.0)
    assert fast.speedup == Spread(2.0, 1.0, 4.0)  # of the rounds' ratios
    assert (fast.rounds, fast.requests, fast.tokens) == (3, 3, 12)


def test_categories_and_all_of_them() -> None:
    job_results = [
        job_result(0, job("chat", 0), plain=4.0, fast=2.0),
        job_result(0, job("code", 1), plain=4.0, fast=1.0),
        job_result(0, job("code", 2), plain=4.0, fast=1.0),
    ]
    by_key = {(r.category, r.method): r for r in rows(job_results)}
    assert list(by_key) == [
        (category, method) for category in ("chat", "code", OVERALL) for method in ("plain", "fast")
    ]
    assert by_key["chat", "fast"].speedup.median == 2
    assert by_key["code", "fast"].speedup.median == 4
    assert by_key[OVERALL, "fast"].speedup.median == 3
    assert by_key[OVERALL, "fast"].tokens_per_second.median == 12 / 4


def test_a_round_cut_short_counts_only_where_there_is_no_other() -> None:
    whole = [job_result(0, job(index=n), plain=4.0) for n in range(2)]
    cut = job_result(1, job(index=0), plain=1.0)
    (row,) = rows([*whole, cut])
    assert (row.rounds, row.tokens_per_second.median) == (1, 1.0)
    (row,) = rows([cut])
    assert (row.rounds, row.tokens_per_second.median) == (1, 4.0)


def test_sweeps_do_not_mix() -> None:
    job_results = [
        job_result(0, job(), plain=4.0),
        job_result(0, job(clients=2), plain=2.0),
        job_result(0, job(temperature=1.0), plain=1.0),
    ]
    figures = rows(job_results)
    speeds = [(r.concurrency, r.temperature, r.tokens_per_second.median) for r in figures]
    assert speeds == [(1, 0.0, 1.0), (2, 0.0, 2.0), (1, 1.0, 4.0)]


def test_latencies() -> None:
    run = outcome(10.0, [(1.0, 1), (2.0, 4), (5.0, 1), (5.5, 1)])
    (row,) = rows([JobResult(job(), 0, {"plain": run})])
    assert run.answers[0].gaps == [(1.0, 4), (3.0, 1), (0.5, 1)]
    assert row.time_to_first_token == 1.0
    assert row.inter_token_p50 == 0.25  # of 0.25 four times, 0.5, 3
    assert row.inter_token_p99 == 3.0
    assert row.stall_p99 == 3.0


def test_an_answer_of_one_delivery_has_no_gaps() -> None:
    run = outcome(1.0, [(0.5, 3)])
    (row,) = rows([JobResult(job(), 0, {"plain": run})])
    assert row.inter_token_p50 is None and row.stall_p99 is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.99, 99), (0.001, 1), (1.0, 100), (0.991, 100)]
)
def test_nearest_rank(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_drafts_add_up() -> None:
    runs = [
        outcome(
            1.0,
            drafted=drafted,
            accepted=accepted,
            reached_at=reached,
            accepted_at=accepted_at,
        )
        for drafted, accepted, reached, accepted_at in (
            (6, 3, [2, 1], [2, 1]),
            (4, 1, [2], [1]),
        )
    ]
    job_results = [JobResult(job(), turn, {"plain": run}) for turn, run in enumerate(runs)]
    (row,) = rows(job_results)
    assert row.drafts["drafted"] == 10 and row.drafts["acceptance_rate"] == 0.4
    assert row.drafts["reached"] == (4, 1) and row.drafts["acceptance"] == (0.75, 1.0)
    assert row.drafts["mean_accepted_length"] == 8 / 4
    assert row.drafts["length"] == 10 / 4


def test_idle_methods_are_found() -> None:
    record = list[JobResult]()
    opened_all = [
        Fake("plain"),
        Fake("silent"),
        Fake("wrong", drafted=9),
        Fake("good", drafted=9, accepted=1),
    ]
    take_turns([job()], opened_all, 2, record)
    assert idle(record, {"silent", "wrong", "good"}) == {
        "silent": "drafted nothing",
        "wrong": "had none of its drafts accepted",
    }
