"""The drafters' benchmark: its arithmetic, and tiny runs of the whole script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drafters
from drafter_suites import Amount, load_suites, varied
from engine_models import write_pair
from entrants import (
    PLAIN,
    REPEATED,
    Entrant,
    Run,
    Weights,
    entries,
    equal_nodes,
    load_target,
    skip_option,
)
from inflate import Sizes
from paceline.core.sequence import DraftCounts
from paceline.drafters import DRAFTERS
from prompts import ALL_SUITES
from random_heads import write_eagle
from standings import Standings, expectations, main_rows, markdown, merged, position_rows

Start = Callable[..., tuple[Any, str, Any]]

ISSUE = (
    "draft,draft_tree,ngram,suffix,lookahead,recycling,early_exit,quantized,layer_skip,medusa,eagle,eagle2,"
    "eagle3,hybrid"
)


def run(tokens: int, steps: int, seconds: float = 1.0) -> Run:
    return Run(tokens, steps, seconds, reached=[steps, 2], accepted=[steps // 2, 1])


def test_a_run_sums_what_sequences_did() -> None:
    total = Run()
    total.add(DraftCounts(target_steps=4, reached_at=[4, 2], accepted_at=[2, 1]), tokens=7)
    total.add(DraftCounts(target_steps=2, reached_at=[2, 2, 2], accepted_at=[2, 2, 2]), tokens=8)
    assert total.length == 2.5
    assert total.by_position == [4 / 6, 3 / 4, 1.0]
    assert Run().length is None and Run().by_position == []


def filled() -> Standings:
    standings = Standings()
    for number, seconds in enumerate((1.0, 4.0, 2.0)):
        standings.timed((0.0, "arith"), PLAIN, run(8, 8, seconds), number)
    for number, seconds in enumerate((0.5, 1.0, 4.0)):  # 2, 4 and 0.5 times as fast
        standings.timed((0.0, "arith"), "ngram", run(8, 4, seconds), number)
    standings.fixed[0.0, "arith"]["ngram"] = run(9, 6)
    standings.timed((1.0, "arith"), "ngram", run(8, 5, 2.0), 0)
    return standings


def test_speed_is_the_median_ratio_within_rounds() -> None:
    standings = filled()
    assert standings.ratio((0.0, "arith"), "ngram") == 2.0
    assert standings.ratio((0.0, "arith"), PLAIN) == 1.0
    assert standings.ratio((1.0, "arith"), "ngram") is None  # plain decoding was not there
    assert standings.speed((0.0, "arith"), "ngram") == 24 / 5.5


def test_json_is_name_suite_figures() -> None:
    other = Standings()
    other.timed((0.0, "arith"), "ngram", run(8, 2), 0)
    figures = merged({"tiny": filled(), "inflated": other})
    cell = figures["ngram"]["arith"]
    assert cell["mean_accepted_length"] == 1.5  # of the run at a fixed length
    assert cell["adaptive_mean_accepted_length"] == 2.0
    assert cell["vs_plain"] == 2.0
    assert cell["acceptance_per_position"] == [0.5, 0.5]
    assert cell["temperature_1"]["mean_accepted_length"] == 1.6
    assert cell["inflated"]["mean_accepted_length"] == 4.0
    assert figures[PLAIN]["arith"]["mean_accepted_length"] == 1.0
    assert merged({}) == {} and merged({"tiny": Standings()}) == {}


def test_tables() -> None:
    rows = main_rows(filled(), 0.0)
    assert rows[0] == ["drafter", "arithmetic", "mean"]
    assert rows[1:] == [
        ["plain", "1.00 1.00x", "1.00 1.00x"],
        ["ngram", "1.50 2.00x", "1.50 2.00x"],
    ]
    assert position_rows(filled(), 1.0) == [["drafter", "1", "2"], ["ngram", "0.40", "0.50"]]
    assert markdown(rows).splitlines()[1:3] == [
        "| --- | --- | --- |",
        "| plain | 1.00 1.00x | 1.00 1.00x |",
    ]


def test_expectations_are_held_against_figures() -> None:
    standings = filled()
    for name, length in (("eagle3 tree", 3), ("draft tree", 2), ("draft chain", 4)):
        standings.nodes[name]["arith"] = run(length * 5, 5)
    for name, length in (("suffix", 4), ("ngram", 2)):
        standings.fixed[0.0, "arith"][name + REPEATED] = run(length * 5, 5)
    standings.timed((0.0, "arith"), "hybrid", run(8, 4, 0.4), 0)
    lines = expectations(standings)
    assert "met: eagle3 tree above draft tree: 3.00 against 2.00 tokens" in lines
    assert "MISSED: draft tree above draft chain: 2.00 against 4.00 tokens" in lines
    assert "met: ngram on arithmetic at least 1.5: 1.50 against 1.50 tokens" in lines
    assert "met: suffix above ngram on repeated requests: 4.00 against 2.00 tokens" in lines
    assert "met: hybrid at least as fast as ngram on arithmetic: 2.50 against 2.00 x" in lines
    assert lines[-1] == "met: nothing below 0.95x plain (least: plain): 1.00 against 0.95 x"
    assert expectations(Standings()) == []


def test_every_drafter_of_the_issue_has_a_row() -> None:
    names = [entry.name for entry in entries(Weights("t", "d", "m", "e", "e3"))]
    assert names[0] == PLAIN and {*ISSUE.split(",")} <= {*names}
    assert all(entry.spec for entry in entries(Weights("t", "d", "m", "e", "e3")))
    without = {entry.name for entry in entries(Weights("t")) if not entry.spec}
    assert without == {"draft", "draft_tree", "medusa", "eagle", "eagle2", "eagle3", "hybrid"}
    specs = [entry.spec for entry in entries(Weights("t", "d"), skip_option(3, 7))]
    assert "layer_skip:skip=2-3" in specs and "hybrid:suffix+ngram+model:d" in specs


def test_varied_prompts_are_other_words() -> None:
    assert varied("chat", "How are you?") == "How are you? Please answer."
    assert varied("completion", "Once upon a time there was") == "upon a time there was"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = Path(tmp_path_factory.mktemp("drafters"))
    target, draft = write_pair(root)
    return {"target": target, "draft": draft, "eagle3": write_eagle(root, target, 3)}


def test_equal_nodes_are_equal(folders: dict[str, str]) -> None:
    loading = load_target(folders["target"], "float32", "cpu")
    weights = Weights(folders["target"], folders["draft"], None, None, folders["eagle3"])
    counts = {}
    for entry in equal_nodes(weights):
        if entry.spec:
            counts[entry.name] = Entrant(entry, loading, 8, 1).engine.drafter.max_nodes(8)
    assert counts == dict.fromkeys(("draft chain", "draft tree", "eagle3 chain", "eagle3 tree"), 8)


def arguments(folders: dict[str, str], *more: str) -> list[str]:
    paths = [part for name in folders for part in (f"--{name}", folders[name])]
    nowhere = [part for name in ("medusa", "eagle") for part in (f"--{name}", "nowhere")]
    sizes = ["--timed", "2", "--max-tokens", "8", "--dtype", "float32", "--quick"]
    return [*paths, *nowhere, *sizes, "--prompts-dir", folders["target"], *more]


def test_the_whole_script(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        drafters.inflate, "PRESETS", {n: Sizes(128, 5, 112) for n in ("target", "draft")}
    )
    wanted = ("draft", "ngram", "suffix", "layer_skip", "medusa", "eagle3")
    line = arguments(folders, "--models", "tiny,inflated", "--only", ",".join(wanted))
    line += ["--suites", "arith,summ", "--markdown", str(tmp_path / "tables.md")]
    code, out, figures = start(drafters, *line, "--json", str(tmp_path / "all.json"))
    assert code == 0
    assert "left out medusa: its weights are not here" in out
    there = {name for name in wanted if name in DRAFTERS or name == "draft"} - {"medusa"}
    repeated = {name + REPEATED for name in there & {"ngram", "suffix"}}
    assert set(figures) == {PLAIN, *there, *repeated}
    for name in there:
        for suite in ("arith", "summ"):
            cell = figures[name][suite]
            for part in (cell, cell["temperature_1"], cell["inflated"]):
                assert part["mean_accepted_length"] >= 1 and part["vs_plain"] > 0
    assert figures["draft"]["arith"]["acceptance_per_position"][0] > 0
    assert "### tiny, temperature 1: acceptance" in (tmp_path / "tables.md").read_text()
    everything = json.loads((tmp_path / "all.json").read_text())
    assert everything["drafters"] == figures and everything["machine"]["torch"]


def test_ctrl_c_prints_what_was_measured(
    folders: dict[str, str], start: Start, interrupt: Callable[[type, int], None]
) -> None:
    interrupt(Entrant, 5)
    line = arguments(folders, "--only", "draft", "--suites", "arith,chat", "--temperatures", "0")
    code, _, figures = start(drafters, *line)
    assert code == 130
    assert figures["draft"]["chat"]["mean_accepted_length"] > 1
    assert figures["draft"]["chat"]["vs_plain"] is None


def test_temperatures_have_prompts_of_their_own(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    args = drafters.parse(arguments(folders, "--suites", "stories,chat"))
    loading = load_target(folders["target"], "float32", "cpu")
    for suite in load_suites(args, loading, Amount(2, 1, 8)):
        greedy, sampled = suite.prompts[0.0], suite.prompts[1.0]
        assert len(greedy) == len(sampled) == 2 and not any(ids in sampled for ids in greedy)
        assert suite.repeated[0] == greedy[0] and suite.repeated[1] != greedy[1]
    with pytest.raises(SystemExit, match="no prompt of stories fits into"):
        load_suites(args, loading, Amount(2, 1, 140))
    assert "stories: 4 of 4 prompts are too long: left out" in capsys.readouterr().err


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--models", "big"], ["--timed", "0"], ["--prompts", "-1"]):
        with pytest.raises(SystemExit):
            drafters.parse(bad)
    assert "there are tiny and inflated" in capsys.readouterr().err
    assert drafters.parse(["--quick"]).models == ["tiny"]
    assert drafters.parse([]).models == ["tiny", "inflated"]
    assert drafters.parse([]).suites == ",".join(ALL_SUITES)
