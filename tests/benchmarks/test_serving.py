"""The serving benchmark's arithmetic and manners; its figures come from running it."""

from __future__ import annotations

import json

import pytest

serving = pytest.importorskip("serving")


def test_ratios_are_medians_of_rounds() -> None:
    cell = serving.Cell(4)
    cell.rates = {
        ("two", "auto"): [100.0, 90.0, 300.0],
        ("two", "none"): [50.0, 60.0, 100.0],
        ("one", "auto"): [88.0] * 3,
        ("one", "none"): [44.0] * 3,
        ("engine", "auto"): [100.0, 100.0, 100.0],
        ("engine", "none"): [50.0, 50.0, 50.0],
    }
    cell.latencies = {("two", "none"): serving.Latencies([0.1, 0.3, 0.2], [0.01] * 99 + [1.0])}
    two, one = cell.speeds()
    assert (two["processes"], two["speedup"]) == ("two", 2.0)
    assert (two["on_by_engine"], two["off_by_engine"]) == (1.0, 1.2)
    assert (one["processes"], one["speedup"], one["on_by_engine"]) == ("one", 2.0, 0.88)
    (latency,) = cell.times()
    assert latency["first_p50"] == 0.2 and latency["first_p99"] == 0.3
    assert latency["inter_token_p50"] == latency["inter_token_p99"] == 0.01


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--concurrency", "1,x"], ["--rounds", "-1"], ["--concurrency", "0"]):
        with pytest.raises(SystemExit):
            serving.parse(options)
    assert "invalid numbers value: '1,x'" in capsys.readouterr().err
    assert serving.parse(["--quick"]).rounds == 2
    assert serving.parse([]).concurrency == [1, 4, 16]


def test_the_work_is_the_shipped_prompts_with_as_many_tokens_each() -> None:
    work = serving.work_of(serving.parse(["--quick", "--draft", "ngram", "--max-tokens", "6"]))
    assert (work.model, work.draft) == ("paceline/tiny", "ngram")
    assert len(work.prompts) == 16 and work.tokens == 96
    body = json.loads(work.body("x", "none", False))
    assert body["ignore_eos"] and body["speculation"] == {"drafter": "none", "tokens": False}
