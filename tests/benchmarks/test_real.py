"""The scripts with ``--pairs smollm2``: with a tiny target, and with the real one where it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import decoding
import drafters
import matrix
import never_slower
import real
import serving
from entrants import PLAIN, Run
from random_heads import write_eagle
from real_prompts import write_prompts
from report import ADAPTIVE, FIXED, THEIRS
from standings import Standings, real_expectations

Start = Callable[..., tuple[Any, str, Any]]

FEW = "mt_bench,qa"


@pytest.fixture(scope="module")
def folders(pair_room: tuple[Path, dict[str, str]]) -> dict[str, str]:
    root, pair = pair_room
    return pair | {
        "eagle3": write_eagle(root, pair["target"], 3),
        "prompts-dir": str(write_prompts(root / "prompts")),
    }


def line(folders: dict[str, str], *names: str) -> list[str]:
    return [part for name in names for part in (f"--{name}", folders[name])]


def test_drafters(
    folders: dict[str, str], start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--pairs", "smollm2", *line(folders, *folders), "--medusa", "none", "--quick"]
    arguments += ["--only", "ngram,eagle3,hybrid,medusa", "--suites", FEW, "--max-tokens", "8"]
    code, out, figures = start(drafters, *arguments, "--dtype", "float32")
    assert code == 0
    assert {PLAIN, "ngram", "eagle3", "hybrid"} <= set(figures)
    for name in ("ngram", "eagle3", "hybrid"):
        assert set(figures[name]) == {"mt_bench", "qa"}
        for cell in figures[name].values():
            assert cell["vs_plain"] > 0 and cell["temperature_1"]["vs_plain"] > 0
    assert "left out medusa: its weights are not here" in out
    assert "hybrid within 3 % of" in out and "temperature 1, eagle3: mean of 2 sets" in out
    with pytest.raises(SystemExit):
        drafters.parse(["--pairs", "tiny,smollm2"])
    assert "measure it alone" in capsys.readouterr().err
    assert drafters.parse(["--pairs", "smollm2"]).suites == ",".join(real.SETS)


def test_what_was_asked_of_the_real_model() -> None:
    standings = Standings()
    for suite, speeds in (("qa", (1.0, 1.1, 2.0, 1.95)), ("gsm8k", (1.0, 3.0, 2.0, 2.8))):
        for name, speed in zip((PLAIN, "ngram", "eagle3", "hybrid"), speeds, strict=True):
            standings.timed((0.0, suite), name, Run(8, 8, 8 / speed), 0)
    # Answers of other lengths, as sampled ones are, are compared by tokens a second.
    standings.timed((1.0, "qa"), PLAIN, Run(8, 8, 8.0), 0)
    standings.timed((1.0, "qa"), "eagle3", Run(4, 2, 2.0), 0)
    assert real_expectations(standings) == [
        "met: temperature 0, eagle3: mean of 2 sets: 2.00 against 1.70 x",
        "met: temperature 0, eagle3: least, qa: 2.00 against 1.20 x",
        "met: temperature 1, eagle3: mean of 1 sets: 2.00 against 1.30 x",
        "met: hybrid within 3 % of eagle3 on qa: 1.95 against 1.94 x",
        "MISSED: hybrid within 3 % of ngram on GSM8K: 2.80 against 2.91 x",
    ]


def test_decoding(folders: dict[str, str], start: Start) -> None:
    arguments = ["--pairs", "smollm2", *line(folders, *folders), "--suites", FEW, "--quick"]
    arguments += ["--per-suite", "1", "--rounds", "1", "--max-tokens", "8", "--dtype", "float32"]
    code, _, found = start(decoding, *arguments, "--rules")
    assert code == 0
    figures = found["smollm2"]
    for key in ("speculative_vs_plain", "adaptive_vs_plain", "speculative_vs_assisted"):
        assert set(figures[key]) == {"mt_bench", "qa"} and min(figures[key].values()) > 0
    assert set(figures["tokens_per_second"]["qa"]) >= {THEIRS, PLAIN_OURS, FIXED, ADAPTIVE}
    assert figures["plain_equals_transformers"]["qa"] == {"identical": 1}
    assert figures["batch8_adaptive_vs_plain"] > 0


PLAIN_OURS = "paceline plain"


def test_decoding_without_a_draft_model_has_no_assistant(folders: dict[str, str]) -> None:
    arguments = ["--pairs", "smollm2", *line(folders, "target", "eagle3"), "--draft", "none"]
    pair = decoding.find_pair("smollm2", decoding.parse([*arguments, "--dtype", "float32"]))
    assert pair.draft is None and pair.ours.startswith("eagle3:") and pair.ends
    names = [one.name for one in decoding.load(pair, decoding.parse(arguments)).single]
    assert names == [THEIRS, PLAIN_OURS, FIXED, ADAPTIVE]


def test_never_slower(
    folders: dict[str, str], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--pairs", "smollm2", *line(folders, "target", "prompts-dir"), "--quick"]
    arguments += ["--draft", f"eagle3:{folders['eagle3']}", "--tokens", "8", "--rounds", "1"]
    arguments += ["--concurrency", "1,2", "--lengths", "2", "--dtype", "float32"]
    code, _, found = start(never_slower, *arguments)
    assert code == 0 and found is not None
    monkeypatch.setattr(real, "DRAFTS", {"eagle3": "nowhere"})
    args = never_slower.parse(["--pairs", "smollm2", *line(folders, "target")])
    assert args.draft == "ngram" and args.sections == ["sweep", "sampled"]


def test_the_matrix(
    folders: dict[str, str],
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "m.json"
    arguments = ["--matrix", "--pairs", "smollm2", *line(folders, *folders), "--medusa", "none"]
    arguments += ["--drafters", "eagle3,ngram", "--batches", "1,2", "--temperatures", "0"]
    arguments += ["--quick", "--rounds", "1", "--tokens", "40", "--wait", "0", "--json", str(file)]
    monkeypatch.setattr(matrix, "EARLY", 4)
    assert start(never_slower, *arguments)[0] == 0
    cells = json.loads(file.read_text())["cells"]
    assert set(cells) == {f"{name}/b{n}/t0" for name in ("eagle3", "ngram") for n in (1, 2)}
    assert all(own["ratio"] > 0 and own["tokens"] <= 40 * 2 for own in cells.values())
    with pytest.raises(SystemExit):
        matrix.parse(["--matrix", "--pairs", "smollm2", "--prompts", "x.jsonl"])
    assert "choose with --suites" in capsys.readouterr().err


def test_requests_that_end_early_have_fewer_stretches(folders: dict[str, str]) -> None:
    from paceline.core.params import SamplingParams
    from paceline.llm import LLM
    from waves import Contestant, together

    llm = LLM(folders["target"], dtype="float32", draft=None, prefix_sharing=False)
    prompts = [[3, 4, 5], [6, 7, 8, 9]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    free = Contestant("free", llm)
    (whole,) = together([free], prompts, 2, params, (4, 8))
    assert [part.tokens for part in whole.parts] == [8, 8, 8]
    stop = whole.texts[0][5]
    (ended,) = together([Contestant("a", llm, frozenset([stop]))], prompts, 2, params, (4, 8))
    expected = [text.index(stop) + 1 if stop in text else 12 for text in whole.texts]
    assert [len(text) for text in ended.texts] == expected
    assert sum(part.tokens for part in ended.parts) == ended.tokens == sum(expected) < 24


def test_serving_counts_the_tokens_of_answers_that_end(folders: dict[str, str]) -> None:
    from paceline.llm import LLM

    arguments = ["--pairs", "smollm2", *line(folders, "target", "prompts-dir"), "--draft", "ngram"]
    work = serving.work_of(serving.parse([*arguments, "--suites", FEW, "--max-tokens", "6"]))
    assert len(work.prompts) == 8 and work.ends and work.draft == "ngram"
    assert json.loads(work.body("x", "off", False))["ignore_eos"] is False
    llm = LLM(work.model, draft="ngram", dtype="float32")
    free = serving.counted(llm, serving.Work(work.prompts, 6, work.model))
    assert free.tokens == 8 * 6
    assert serving.counted(llm, work).tokens <= 8 * 6
    llm.end_tokens = frozenset(range(10_000))
    assert serving.counted(llm, work).tokens == 8


def test_the_real_model_in_quick_form(start: Start, tmp_path: Path) -> None:
    try:
        target = real.target_folder(None)
    except SystemExit as error:
        pytest.skip(str(error))
    prompts = write_prompts(tmp_path / "prompts")
    arguments = ["--pairs", "smollm2", "--target", str(target), "--prompts-dir", str(prompts)]
    arguments += ["--suites", "qa", "--quick", "--max-tokens", "12", "--only", "ngram"]
    arguments += ["--temperatures", "0"]
    code, _, figures = start(drafters, *arguments)
    assert code == 0 and figures["ngram"]["qa"]["vs_plain"] > 0
