"""The never-slower matrix: its arithmetic, fresh states, and tiny runs of the whole script."""

import json
from pathlib import Path
from typing import Any

import pytest

import matrix
import never_slower
from engine_models import write_pair
from matrix_figures import against_best, against_plain
from waves import Part, moment, parts_of


def ran(speed: float, late: float = 1.0, **more: Any) -> dict[str, Any]:
    """A run as the file has it: 100 tokens, the second half of them in ``late`` seconds."""
    parts = [{"tokens": 50, "seconds": 1.0}, {"tokens": 50, "seconds": late}]
    found = {"speed": speed, "parts": parts, "cpu": 1.0, "waves": [speed], "startup": 0.5}
    found |= {"drafted": 20, "accepted": 5, "tokens": 100, "target_steps": 50, "drafting": 10}
    return found | more


def one_round(**contestants: dict[str, Any]) -> dict[str, Any]:
    return {**contestants, "others": 0.0, "same_text": 1.0}


def test_a_cell_is_the_median_of_its_rounds() -> None:
    rounds = [one_round(plain=ran(100.0), auto=ran(speed)) for speed in (50.0, 96.0, 99.0)]
    figures = against_plain(rounds)
    assert figures["ratio"] == 0.96 and not figures["met"]
    assert figures["by_round"] == [0.5, 0.96, 0.99]
    assert figures["drafted"] == 60 and figures["steps_that_drafted"] == 0.2
    rounds[0]["auto"]["speed"] = 97.0
    assert against_plain(rounds)["met"]


def test_the_stretches_of_a_cell_are_told_apart() -> None:
    figures = against_plain([one_round(plain=ran(100.0), auto=ran(80.0, late=2.0))])
    assert figures["parts"] == [1.0, 0.5]


def test_the_best_fixed_length_is_that_of_the_last_stretch() -> None:
    contestants = {"plain": ran(9.0), "2": ran(5.0, late=0.5), "4": ran(99.0), "auto": ran(1.0)}
    figures = against_best([one_round(**contestants)])
    assert figures["best"] == "2" and figures["ratio"] == 0.5 and not figures["met"]


def test_a_step_brings_its_tokens_evenly() -> None:
    arrivals = [(1.0, 1), (3.0, 4), (4.0, 1)]
    assert [moment(arrivals, n) for n in (1, 3, 5, 6)] == [1.0, 2.0, 3.0, 4.0]
    assert parts_of(arrivals, (3, 99), 6) == [Part(3, 2.0), Part(3, 2.0)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(Path(tmp_path_factory.mktemp("pair")))[0]


def start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[Any, str, str]:
    line = ["--pair", arguments[0], "--dtype", "float32", "--wait", "0", "--drafters", "ngram"]
    line += ["--batches", "1,2", "--temperatures", "0", "--tokens", "12", "--after", "8"]
    monkeypatch.setattr("sys.argv", ["never_slower.py", *line, *arguments[1:]])
    monkeypatch.setattr(matrix, "EARLY", 4)
    with pytest.raises(SystemExit) as ended:
        never_slower.main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_whole_matrix_and_going_on(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    files = ["--matrix", "--json", str(path), "--report", str(tmp_path / "all.md")]
    code, out, err = start(monkeypatch, capsys, target, *files, "--rounds", "1")
    assert code == 0 and "ngram/b2/t0 round 1/1" in err
    record = json.loads(path.read_text())
    assert set(record["cells"]) == {"ngram/b1/t0", "ngram/b2/t0"}
    assert json.loads(out.strip().splitlines()[-1])["worst"] == record["worst"]
    cell = record["cells"]["ngram/b2/t0"]
    assert cell["same_text"] == 1.0 and cell["tokens"] == 24 and len(cell["parts"]) == 3
    assert "Missed" in (tmp_path / "all.md").read_text()
    before = record["rounds"]
    code, out, err = start(monkeypatch, capsys, target, *files, "--rounds", "2")
    record = json.loads(path.read_text())
    assert "round 1/2" not in err and "round 2/2" in err
    assert all(rounds[:1] == before[key] for key, rounds in record["rounds"].items())
    code, _, _ = start(monkeypatch, capsys, target, *files, "--tokens", "9")
    assert "other settings" in str(code)


def test_against_fixed_lengths_with_waves_and_another_drafter(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fixed.json"
    more = ["--rounds", "2", "--lengths", "1,2", "--requests", "3", "--json", str(path)]
    spec = ["--spec", "mine=ngram:min=2"]
    code, _, _ = start(monkeypatch, capsys, target, "--fixed", *more, *spec)
    assert code == 0
    record = json.loads(path.read_text())
    assert set(record["cells"]) == {f"{n}/b{b}/t0" for n in ("ngram", "mine") for b in (1, 2)}
    cell = record["cells"]["mine/b2/t0"]
    assert set(cell["tokens_per_second"]) == {"plain", "1", "2", "auto"}
    assert cell["tokens"] == 2 * 4 * 12  # two rounds of two waves
    assert len(record["rounds"]["ngram/b1/t0"][0]["auto"]["waves"]) == 3


def test_the_time_is_up(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = start(monkeypatch, capsys, target, "--matrix", "--seconds", "0")
    assert code == 0 and "the time is up" in err
    assert json.loads(out.strip().splitlines()[-1]) == {"worst": None, "missed": []}


def test_every_round_starts_without_any_history(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an LLM learns must not reach the next one by way of the shared weights or a module."""
    line = ["--matrix", "--pair", target, "--dtype", "float32", "--drafters", "suffix,recycling"]
    line += ["--tokens", "12", "--after", "8", "--wait", "0"]
    bench = matrix.Bench(matrix.parse(line))
    for name in ("suffix", "recycling"):
        cell = matrix.Cell(name, 2, 0.0)
        first, _ = bench._fresh(cell, "4", 0)
        text = first.run(bench.prompts[:2], 2, 12)
        again, _ = bench._fresh(cell, "4", 0)
        assert again.llm.engine.drafter is not first.llm.engine.drafter
        assert again.llm.engine.controller is not first.llm.engine.controller
        new = again.run(bench.prompts[:2], 2, 12)
        assert (new.drafted, new.accepted) == (text.drafted, text.accepted)


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], target: str) -> None:
    for bad in (["--batches", "0"], ["--spec", "ngram"], ["--fixed", "--tokens", "100"]):
        with pytest.raises(SystemExit):
            matrix.parse(bad)
    with pytest.raises(SystemExit, match="no drafter 'fast'; there are ngram"):
        matrix.pair_of(matrix.parse(["--pair", target, "--drafters", "fast"]))
    assert matrix.parse([]).rounds == 5 and matrix.parse(["--quick"]).rounds == 2
