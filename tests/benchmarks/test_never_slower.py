"""The never-slower benchmark: its arithmetic, and a tiny run of the whole script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import never_slower
from engine_models import write_pair
from never_slower_report import as_record, as_report, cell_record, useless_record
from waves import Contestant, Run, StepTrace

Start = Callable[..., tuple[Any, str, Any]]


def run(seconds: float, tokens: int = 100, late: float = 1.0) -> Run:
    return Run(
        tokens,
        seconds,
        drafted=60,
        target_steps=30,
        texts=[(1, 2)],
        steps=[StepTrace(0.0, 2, 1.0), StepTrace(1.0, 2, 3.0)],
        late_tokens=50,
        late_seconds=late,
    )


def test_auto_is_held_against_the_best_median() -> None:
    rounds = {
        "plain": [run(1.0), run(1.0), run(9.0)],
        "2": [run(0.5), run(0.5), run(0.4)],
        "4": [run(0.1), run(2.0), run(2.0)],  # fastest once, but not by its median
        "auto": [run(0.5), run(0.625), run(0.8)],
    }
    figures = cell_record(rounds)
    assert figures["best"] == "2"
    assert figures["auto_vs_best"] == 0.8
    assert figures["auto_vs_best_by_round"] == [1.0, 0.8, 0.5]
    assert figures["auto_vs_plain"] == 1.6
    assert figures["auto_mean_length"] == 2.0
    assert figures["same_text"] == 1.0
    assert figures["spread"]["2"] == 0.125


def test_a_useless_draft_is_judged_after_its_first_tokens() -> None:
    rounds = {"plain": [run(1.0), run(1.0)], "auto": [run(2.0, late=1.0), run(2.0, late=1.25)]}
    figures = useless_record(rounds)
    assert figures["late_vs_plain"] == 0.9 and figures["late_by_round"] == [1.0, 0.8]
    assert figures["whole_vs_plain"] == 0.5 and figures["drafted_per_1000_tokens"] == 600


def test_the_worst_ratio_of_each_section_stands_out() -> None:
    runs = {
        "sweep/1": {"plain": [run(1.0)], "auto": [run(0.5)]},
        "sweep/8": {"plain": [run(1.0)], "auto": [run(2.0)]},
        "load/1": {"plain": [run(1.0)], "auto": [run(1.0)]},
        "load/4": {"plain": [run(1.0)]},  # interrupted
        "useless/1": {"plain": [run(1.0)], "auto": [run(1.0, late=2.0)]},
    }
    record = as_record(runs)
    assert record["worst"] == {"sweep": 0.5, "load": 1.0, "useless": 0.5}
    about = {"cpu": "a processor", "threads": 1, "torch": "2", "transformers": "5"}
    report = as_report(runs, record | {"machine": about})
    assert [section.title for section in report.sections][-2:] == ["A useless draft", "Machine"]
    assert all(figure.draw().startswith("<?xml") for figure in report.figures())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("pair")))


def line(pair: tuple[str, str], *more: str) -> list[str]:
    sizes = ["--quick", "--rounds", "1", "--tokens", "6", "--concurrency", "1,2", "--lengths", "1"]
    models = ["--model", pair[0], "--draft", f"model:{pair[1]}", "--dtype", "float32"]
    return [*models, *sizes, *more]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_slower, "EARLY", 12)
    monkeypatch.setattr(never_slower, "PHASES", (1, 2))


@pytest.mark.usefixtures("short")
def test_the_whole_script(pair: tuple[str, str], tmp_path: Path, start: Start) -> None:
    files = ["--json", str(tmp_path / "all.json"), "--report", str(tmp_path / "all.md")]
    sections = ["--sections", "sweep,sampled,load,useless"]
    code, _, worst = start(never_slower, *line(pair, *files, *sections))
    assert code == 0
    assert set(worst) == {"sweep", "sampled", "load", "useless"}
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["worst"] == worst and set(record["sweep/2"]["tokens_per_second"]) == {
        "plain",
        "1",
        "auto",
    }
    assert record["sweep/1"]["same_text"] == 1.0
    assert "Concurrency, greedy" in (tmp_path / "all.md").read_text()
    assert len(list(tmp_path.glob("*never_slower*.svg"))) == 2


@pytest.mark.usefixtures("short")
def test_ctrl_c_prints_what_was_measured(
    pair: tuple[str, str], start: Start, interrupt: Callable[[type, int], None]
) -> None:
    interrupt(Contestant, 9)  # warm-up of two cells, one whole cell
    code, _, worst = start(never_slower, *line(pair, "--sections", "sweep"))
    assert code == 130
    assert set(worst) == {"sweep"}


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--sections", "speed"], ["--concurrency", "0"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            never_slower.parse(bad)
    assert "no section speed; there are sweep" in capsys.readouterr().err
    assert never_slower.parse(["--quick"]).sections == ["sweep", "useless"]
    assert never_slower.parse([]).lengths == [1, 2, 3, 4, 6, 8]
