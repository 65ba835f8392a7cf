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


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--concurrency", "1,x"], ["--rounds", "-1"], ["--concurrency", "0"]):
        with pytest.raises(SystemExit):
            serving.parse(options)
    assert "write numbers, as in 1,4,16" in capsys.readouterr().err
    assert serving.parse(["--quick"]).rounds == 2
    assert serving.parse([]).concurrency == [1, 4, 16]
