"""The serving benchmark's arithmetic and manners; its figures come from running it."""

from __future__ import annotations

import pytest

serving = pytest.importorskip("serving")


def test_ratios_are_medians_of_rounds() -> None:
    cell = serving.Cell(4)
    cell.rates = {
        "http auto": [100.0, 90.0, 300.0],
        "http off": [50.0, 60.0, 100.0],
        "engine auto": [100.0, 100.0, 100.0],
        "engine off": [50.0, 50.0, 50.0],
    }
    assert cell.ratio("http auto", "http off") == 2.0
    assert cell.ratio("http auto", "engine auto") == 1.0
    cell.latencies = {"off": serving.Latencies([0.1, 0.3, 0.2], [0.01] * 99 + [1.0])}
    found = cell.record()
    assert found["speedup"] == 2.0 and found["server_by_engine"] == {"auto": 1.0, "off": 1.2}
    latency = found["latency"]["off"]
    assert latency["first_p50"] == 0.2 and latency["first_p99"] == 0.3
    assert latency["inter_token_p50"] == latency["inter_token_p99"] == 0.01


def test_both_kinds_of_servers_stand_beside_each_other() -> None:
    cell = serving.Cell(16)
    cell.rates = {
        f"{kind} {way}": [rate]
        for kind, rate in (("http", 95.0), ("single", 88.0), ("engine", 100.0))
        for way in serving.WAYS
    }
    cell.latencies = {name: serving.Latencies([0.1], [0.01]) for name in ("off", "single off")}
    assert cell.record()["server_by_engine"] == {
        "auto": 0.95,
        "off": 0.95,
        "single auto": 0.88,
        "single off": 0.88,
    }
    args = serving.parse(["--processes", "both"])
    speed, times = serving.tables([cell], serving.Work(["a"], 4), args)
    assert [row[1] for row in speed.rows] == [row[1] for row in times.rows] == ["two", "one"]


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--concurrency", "1,x"], ["--rounds", "-1"], ["--concurrency", "0"]):
        with pytest.raises(SystemExit):
            serving.parse(options)
    assert "write numbers, as in 1,4,16" in capsys.readouterr().err
    assert serving.parse(["--quick"]).rounds == 2
    assert serving.parse([]).concurrency == [1, 4, 16]
