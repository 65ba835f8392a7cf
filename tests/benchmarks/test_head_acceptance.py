"""Acceptance in our engine, as of the real model: its arithmetic, and a tiny run of the script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import acceptance
import real
from paceline import LLM
from paceline.lab.bench.engines import Paceline
from support.engine_models import write_pair
from support.random_heads import write_eagle
from support.real_prompts import write_prompts
from support.walked_drafts import Walk, greedy_drafts, greedy_texts, walk


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = Path(tmp_path_factory.mktemp("heads"))
    target, draft = write_pair(root)
    prompts = str(write_prompts(root / "prompts"))
    return {
        "target": target,
        "draft": draft,
        "eagle3": write_eagle(root, target, 3),
        "prompts-dir": prompts,
    }


def start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str]
) -> tuple[Any, str, str, dict[str, Any]]:
    """Exit code, output, messages, and the JSON object of the last line."""
    monkeypatch.setattr("sys.argv", ["acceptance.py", "--pairs", "smollm2", *line])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err, json.loads(out.strip().splitlines()[-1])


def arguments(folders: dict[str, str], *more: str) -> list[str]:
    paths = [part for name, path in folders.items() for part in (f"--{name}", path)]
    return [*paths, "--dtype", "float32", "--max-tokens", "24", *more]


def test_the_engine_accepts_what_transformers_says(
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    line = arguments(folders, "--medusa", "none", "--json", str(tmp_path / "found.json"))
    code, out, err, found = start(monkeypatch, capsys, line)
    assert code == 0 and "left out medusa" not in err
    assert json.loads((tmp_path / "found.json").read_text()) == found
    rows = ["eagle3 chain 4", "eagle3 tree 16", "draft chain 4", "draft tree 16"]
    assert list(found) == [*rows, "settings"]
    assert "eagle3 chain 4" in out

    llm = LLM(folders["target"], draft="none", dtype="float32")
    models = [
        AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
        for name in ("target", "draft")
    ]
    ends = llm.end_tokens
    suites = real.load_suites(folders["prompts-dir"], real.ACCEPTANCE_SETS, llm.tokenizer, 0, 120)
    for name, prompts in suites.items():
        counts = Walk(4)
        texts = greedy_texts(models[0], prompts, 24, ends)
        for prompt, text in zip(prompts, texts, strict=True):
            drafts = greedy_drafts(models[1], prompt, text, 4)
            walk(text, drafts, 4, counts)
            # The step that reads the prompt drafts, too, but does not count.
            run = next((n for n in range(4) if drafts[0][n] != text[n]), 4)
            counts.steps, counts.committed = counts.steps - 1, counts.committed - run - 1
        expected = counts.summary()["mean_accepted_length"]
        measured = found["draft chain 4"][name]["mean_accepted_tokens"]
        assert measured == pytest.approx(expected, abs=1e-3)
    lengths = [found["draft chain 4"][name]["mean_accepted_tokens"] for name in suites]
    assert found["draft chain 4"]["mean"]["mean_accepted_tokens"] == pytest.approx(
        sum(lengths) / 4, abs=1e-3
    )


def test_what_is_not_here_is_left_out_or_refused(
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(real, "DRAFTS", {name: f"nowhere/{name}" for name in real.DRAFTS})
    own = {key: folders[key] for key in ("target", "draft", "prompts-dir")}
    code, _, err, found = start(monkeypatch, capsys, arguments(own, "--suites", "qa"))
    assert code == 0 and list(found) == ["draft chain 4", "draft tree 16", "settings"]
    assert "left out eagle3: nowhere/eagle3 is not here" in err
    assert found["settings"]["from_spec_bench"] == ["qa"]
    for bad, words in (
        (["--eagle3", "nowhere"], "error: --eagle3: 'nowhere' has no config.json"),
        (["--suites", "alpaca"], "no shipped prompts for 'alpaca'"),
        (["--target", "nowhere"], "'nowhere' has no config.json"),
        (["--draft", "none", "--eagle3", "none", "--medusa", "none"], "no drafts to measure"),
    ):
        monkeypatch.setattr(
            "sys.argv", ["acceptance.py", "--pairs", "smollm2", *arguments(own), *bad]
        )
        with pytest.raises(SystemExit, match=words):
            acceptance.main()


def test_no_prompt_comes_twice(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = real.texts(folders["prompts-dir"], real.SETS)
    assert set(texts) == set(real.SETS)
    everything = [text for own in texts.values() for text in own]
    assert len(everything) == len(set(everything)) == 4 * len(real.SETS)
    alone = real.texts(folders["prompts-dir"], ["math_reasoning"])
    assert len(alone["math_reasoning"]) == 5
    with pytest.raises(SystemExit, match="no prompt of gsm8k fits into 3 tokens"):
        real.load_sets(folders["prompts-dir"], ["gsm8k"], lambda text: [0] * 4, 3)
    sizes = iter((2, 9, 2, 2))
    real.load_sets(folders["prompts-dir"], ["gsm8k"], lambda text: [0] * next(sizes), 3)
    assert "gsm8k: 1 of 4 prompts are too long" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured(
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupt: Callable[[type, int], None],
) -> None:
    interrupt(Paceline, 2)
    code, _, _, found = start(monkeypatch, capsys, arguments(folders, "--medusa", "none"))
    assert code == 130
    assert set(found["eagle3 chain 4"]) == {"mt_bench", "gsm8k", "mean"}


def test_options_of_the_other_pair_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--eagle3", "x"], ["--pairs", "smollm2", "--ignore-eos"], ["--nodes", "0"]):
        with pytest.raises(SystemExit):
            acceptance.parse(bad)
    assert "--eagle3, --medusa and --temperature need --pairs smollm2" in capsys.readouterr().err
    assert acceptance.parse([]).suites == "stories,arith,chat,stdlib"
    assert acceptance.parse(["--pairs", "smollm2"]).suites == ",".join(real.ACCEPTANCE_SETS)
