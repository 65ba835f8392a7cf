"""The report of a result: which sections, which pictures."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from paceline.lab.bench.pages import report_of
from paceline.lab.bench.result import BenchResult, SameTexts, rows
from paceline.lab.bench.runner import ALL_PROMPTS, BenchJob, JobResult, Method
from paceline.lab.report.document import Spread, is_number
from paceline.lab.report.render import print_report
from support.made_outcomes import job, outcome, sums

MACHINE = {
    "processor": "A",
    "device": "cpu",
    "backend": "native",
    "threads": 1,
    "cores": 2,
    "dtype": "bfloat16",
    "torch": "2",
}
SETTINGS = {"prompts": 2, "source": "x.jsonl", "max_tokens": 4}
METHODS = [Method("plain", length=0), Method("model:a/quick@2", "model:a/quick", 2)]


def one_result(where: BenchJob, turn: int = 0) -> JobResult:
    phases = {"draft": 0.002, "target": 0.004, "verify": 0.001, "other": 0.001}
    common = {"decoding": sums(1, phases)}
    fast = {"drafted": 4, "accepted": 2, "reached_at": [2, 1], "accepted_at": [1, 1]}
    outcomes = {
        "plain": outcome(4.0, **common, not_drafted={"none is asked for": 4}),
        "model:a/quick@2": outcome(2.0, **common, **fast),
    }
    return JobResult(where, turn, outcomes)


def result(*jobs: BenchJob, **more: object) -> BenchResult:
    record = [one_result(where, turn) for turn in range(2) for where in jobs]
    measured = rows(record)
    options = {"texts": {"model:a/quick@2": SameTexts(4)}, "idle": {}, **more}
    return BenchResult("m", MACHINE, SETTINGS, METHODS, measured, **options)  # type: ignore[arg-type]


def sections(measured: BenchResult) -> list[str]:
    return [section.title for section in report_of(measured).sections]


def shown(measured: BenchResult) -> str:
    out = io.StringIO()
    print_report(report_of(measured), Console(file=out, width=150))
    return " ".join(out.getvalue().split())  # notes are wrapped


def test_one_client_two_categories() -> None:
    measured = result(job("chat", 0), job("code", 1))
    assert sections(measured) == [
        "Verdict",
        "Run",
        "Methods",
        "Latency",
        "By category",
        "Acceptance by position",
        "Same text as plain decoding",
    ]
    text = shown(measured)
    assert "model:quick@2" in text and "a/quick" not in text
    assert (
        "use model:quick@2: 2.00x the speed of plain decoding (2.00 to 2.00). "
        "4 of 4 texts are the same." in text
    )
    assert "2.00x" in text
    assert "0.50 (8)" in text  # accepted at position 1, and how many drafts had one there


def test_details_are_shown_on_request() -> None:
    out = io.StringIO()
    print_report(report_of(result(job("chat", 0), job("code", 1))), Console(file=out), False)
    text = out.getvalue()
    assert text.startswith("Verdict") and "Methods" in text and "0.50 (8)" not in text
    details = "Latency, By category, Acceptance by position, Same text as plain decoding"
    assert f"With --details: {details}." in " ".join(text.split())


def test_a_draft_that_does_not_pay_is_not_advised() -> None:
    job_result = one_result(job())
    job_result.runs["model:a/quick@2"] = outcome(8.0, drafted=4, accepted=2)
    text = shown(replace(result(job()), rows=rows([job_result])))
    assert "use no draft: the best, model:quick@2, reaches 0.50x the speed of plain" in text


def test_a_gain_that_may_be_none_is_not_advised() -> None:
    measured = result(job())
    unsure = [
        row if row.method == "plain" else replace(row, interval=(0.93, 2.4))
        for row in measured.rows
    ]
    text = shown(replace(measured, rows=unsure))
    assert "undecided, give more --seconds: model:quick@2 reaches 2.00x the speed" in text
    assert "plain decoding (0.93 to 2.40)" in text


def test_sweeps_have_their_tables() -> None:
    many = [job(ALL_PROMPTS, 0, 4, temperature=t) for t in (0.0, 0.7)]
    measured = result(
        *(job(c, n, temperature=t) for n, c in enumerate(["chat", "code"]) for t in (0.0, 0.7)),
        *many,
    )
    assert "By category at temperature 0.7" in sections(measured)
    text = shown(measured)
    assert "clients" in text and "temperature" in text


def test_several_clients_alone() -> None:
    assert "By category" not in sections(result(job(ALL_PROMPTS, 0, 4)))


def test_what_must_not_be_missed() -> None:
    idle = {"model:a/quick@2": "drafted nothing"}
    measured = result(job(), idle=idle, interrupted=True, left_out=["long/1"])
    text = shown(measured)
    assert "drafted nothing in the whole run" in text and "Verdict" not in sections(measured)
    assert "Interrupted" in text and "long/1" in text


def test_the_record_has_everything() -> None:
    record = result(job(), left_out=["a"]).record()
    assert set(record) == {
        *("model", "interrupted", "machine", "settings", "methods", "figures"),
        *("texts", "idle", "bugs", "prompts_left_out", "budget"),
    }
    row = record["figures"][1]
    assert row["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert row["drafts"]["reached"] == (4, 2)


def test_a_method_that_never_drafted_has_no_acceptance_of_zero() -> None:
    job_results = [
        one_result(job(c, n, temperature=t))
        for n, c in enumerate(("chat", "code"))
        for t in (0.0, 1.0)
    ]
    for job_result in job_results:
        job_result.runs["model:a/quick@2"] = job_result.runs["plain"]
    measured = replace(result(job("chat", 0)), rows=rows(job_results))
    text = shown(measured)
    assert "accepted" in text and "0%" not in text and "None" not in text


def test_medians_with_spread() -> None:
    rate = Spread(359.4, 354.0, 360.0).shown(0)
    assert rate == "359 ±3" and is_number(rate)
    assert Spread(1.424, 1.38, 1.49).shown(2, "x") == "1.42x ±0.06"
    assert Spread(1.0, 1.0, 1.0).shown(2, "x") == "1.00x"
