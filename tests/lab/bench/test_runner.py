"""Rounds: who runs when, what a sweep consists of, what an interruption leaves."""

from __future__ import annotations

import pytest

from paceline.lab.bench.runner import (
    ALL_PROMPTS,
    BenchEngine,
    JobResult,
    Method,
    Sweep,
    take_turns,
    warm_up,
)
from support.made_outcomes import Fake, job

PROMPTS = [("chat", [1, 2]), ("code", [3]), ("code", [4, 5, 6])]


def test_turns_rotate_within_and_between_rounds() -> None:
    diary: list[str] = []
    todo = [job(index=0), job(index=1)]
    record = list[JobResult]()
    engines = [Fake(name, diary) for name in "abc"]
    warm_up(todo, engines)
    take_turns(todo, engines, 2, record)
    assert diary == [
        *("a 1 x4", "b 1 x4", "c 1 x4"),  # warm-up
        *("a refreshed", "b refreshed", "c refreshed"),
        *("a 1 x4", "b 1 x4", "c 1 x4", "b 2 x4", "c 2 x4", "a 2 x4"),
        *("a refreshed", "b refreshed", "c refreshed"),
        *("b 1 x4", "c 1 x4", "a 1 x4", "c 2 x4", "a 2 x4", "b 2 x4"),
    ]
    assert [(job_result.round_index, job_result.job.index) for job_result in record] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(list(job_result.runs) == ["a", "b", "c"] for job_result in record)


def test_warm_up_is_short_and_once_a_shape() -> None:
    diary: list[str] = []
    warm_up(Sweep(100, temperature=[0.0, 0.7]).jobs(PROMPTS, 1), [Fake("a", diary)])
    assert [entry.endswith("x16") for entry in diary] == [True, True]


def test_ctrl_c_leaves_complete_heats() -> None:
    record, second = list[JobResult](), Fake("b", interrupted_at=3)  # two jobs, then
    with pytest.raises(KeyboardInterrupt):
        take_turns([job(index=n) for n in range(5)], [Fake("a"), second], 1, record)
    assert [job_result.job.index for job_result in record] == [0, 1]


def test_progress_says_what_runs() -> None:
    seen: list[str] = []
    take_turns(
        [job("chat"), job("code", 1)],
        [Fake("a"), Fake("b")],
        2,
        list[JobResult](),
        seen.append,
    )
    assert len(seen) == 8 and seen[:2] == ["chat: a", "chat: b"]


def test_one_client_gets_a_job_a_prompt() -> None:
    jobs = Sweep(8, temperature=[0.5], seed=5).jobs(PROMPTS, 1)
    jobs.sort(key=lambda job: job.index)
    assert [(j.category, len(j.requests)) for j in jobs] == [("chat", 1), ("code", 1), ("code", 1)]
    assert [j.requests[0].params.seed for j in jobs] == [5, 6, 7]
    assert jobs[0].requests[0].prompt == (1, 2)
    assert Sweep(8, seed=5).jobs(PROMPTS, 1)[0].requests[0].params.seed is None


@pytest.mark.parametrize(("clients", "requests"), [(2, 4), (4, 8)])
def test_several_clients_share_all_prompts(clients: int, requests: int) -> None:
    (job,) = Sweep(8).jobs(PROMPTS, clients)
    assert job.category == ALL_PROMPTS and len(job.requests) == requests
    assert [a.prompt for a in job.requests[:4]] == [(1, 2), (3,), (4, 5, 6), (1, 2)]


def test_a_sweep_starts_everybody_at_every_concurrency() -> None:
    methods = [Method("plain"), Method("ngram", "ngram"), Method("suffix", "suffix")]
    sweep = Sweep(8, [1, 4], [0.0, 1.0], 3)
    started: list[tuple[str, int]] = []

    def start(method: Method, clients: int) -> BenchEngine:
        started.append((method.name, clients))
        return Fake(method.name)

    record, told = list[JobResult](), list[str]()
    sweep.run(PROMPTS, methods, start, record, told.append)
    assert started == [(method.name, clients) for clients in (1, 4) for method in methods]
    runs = [what for what in told if ": " in what]
    assert len(runs) == 3 * sweep.wanted(PROMPTS) * 3 == 3 * (2 * 3 * 3 + 2 * 3)
    assert len(record) == 3 * (2 * 3 + 2)
