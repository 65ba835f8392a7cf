"""``--seconds``, ``--continue`` and ``--state`` of the measuring commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab.certify.run import Certifier
from support.command_lines import paceline
from support.tiny_models import TinyPair


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "three.txt"
    texts = ("Once upon a time there was", "The quick brown fox", "one two one two one two")
    file.write_text("\n---\n".join(texts), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def certify(tiny_pair: TinyPair, prompts: str) -> list[str]:
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    small = ["--texts", "2", "--max-tokens", "8", "--prefixes", "1", "--samples", "200"]
    return ["certify", *pair, "--draft-length", "2", "--prompts", prompts, *small, "--json"]


@pytest.fixture(scope="module")
def bench(prompts: str) -> list[str]:
    few = ["--rounds", "1", "--max-tokens", "6", "--per-category", "2", "--prompts", prompts]
    return ["bench", "-m", "ngram@2", *few, "--allow-idle", "--json"]


@pytest.fixture
def tune(prompts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr("paceline.lab.tune.plan.LARGEST_BATCH", 2)
    small = ["--draft", "ngram", "--only", "--max-tokens", "9", "--rounds", "1"]
    return ["tune", *small, "--prompts", prompts, "--out", str(tmp_path / "p.toml"), "--json"]


# -- too little time ------------------------------------------------------------------------------


def test_no_time_is_neither_a_pass_nor_a_failure(certify: list[str]) -> None:
    result = paceline(*certify, "--seconds", "0.001")
    assert result.exit_code == 3, result.output
    record = json.loads(result.stdout)
    assert not record["lossless"] and not record["enough"] and record["problems"] == []
    assert record["verdict"].startswith("NOT ENOUGH: ")
    assert record["budget"]["seconds"] == 0.001 and record["budget"]["texts"] == 0


def test_a_benchmark_without_time_says_so(bench: list[str]) -> None:
    result = paceline(*bench, "--seconds", "0.001")
    assert result.exit_code == 3 and result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "0.001 s were not enough to measure anything" in line and "--seconds" in line


def test_a_tuning_without_time_writes_no_profile(tune: list[str], tmp_path: Path) -> None:
    result = paceline(*tune, "--seconds", "0.001")
    assert result.exit_code == 3, result.output
    record = json.loads(result.stdout)
    assert not record["confirmed"] and record["profile"] is None
    assert record["budget"]["missing"] == ["ngram"]
    assert not (tmp_path / "p.toml").exists()
    assert "no profile was written" in result.stderr
    more = paceline(*tune, "--seconds", "0", "--continue")
    assert more.exit_code == 0, more.output
    assert json.loads(more.stdout)["budget"]["missing"] == []
    assert (tmp_path / "p.toml").exists()


# -- going on -------------------------------------------------------------------------------------


def test_certify_goes_on(certify: list[str], runs: Path) -> None:
    first = paceline(*certify, "--seconds", "0")
    assert first.exit_code == 0, first.output
    assert len(list(runs.glob("certify-*.json"))) == 1
    more = paceline(*certify, "--seconds", "0", "--continue")
    assert more.exit_code == 0, more.output
    one, two = json.loads(first.stdout), json.loads(more.stdout)
    assert two["budget"]["verdicts"] == 2 and two["budget"]["texts"] == 4
    assert two["budget"]["samples"] == 2 * one["budget"]["samples"]
    assert two["smallest_bias"] < one["smallest_bias"]
    assert two["alpha"] == one["alpha"] / 2
    anew = json.loads(paceline(*certify, "--seconds", "0").stdout)
    assert anew["budget"]["verdicts"] == 1


def test_bench_goes_on(bench: list[str], tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "deep" / "s.json"), "--seconds", "0"]
    one = json.loads(paceline(*bench, *state).stdout)
    more = paceline(*bench, *state, "--continue")
    assert more.exit_code == 0, more.output
    two = json.loads(more.stdout)
    assert (
        two["budget"]["done"]["turns of all methods"]
        == 2 * one["budget"]["done"]["turns of all methods"]
        == 4
    )
    assert {row["rounds"] for row in two["figures"]} == {2}
    assert two["budget"]["spent"] > one["budget"]["spent"]


def test_ctrl_c_keeps_what_was_measured(
    certify: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Certifier.run

    def interrupted(self: Certifier, advance: object) -> None:
        count = 0

        def soon(what: str) -> None:
            nonlocal count
            count += 1
            if count == 4:
                raise KeyboardInterrupt

        whole(self, soon)

    with monkeypatch.context() as patch:
        patch.setattr(Certifier, "run", interrupted)
        first = paceline(*certify, "--seconds", "0")
        assert first.exit_code == 130
        assert "NOT CERTIFIED: interrupted" in json.loads(first.stdout)["verdict"]
    seen: list[str] = []

    def listening(self: Certifier, advance: object) -> None:
        seen.extend(self.evidence.done)
        whole(self)

    monkeypatch.setattr(Certifier, "run", listening)
    more = paceline(*certify, "--seconds", "0", "--continue")
    assert more.exit_code == 0, more.output
    assert len(seen) == 3


# -- refusals -------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = paceline(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and "unexpected" not in line
    return line


def test_another_option_is_named(certify: list[str], bench: list[str]) -> None:
    paceline(*certify, "--seconds", "0")
    line = refused(*certify, "--continue", "--samples", "300")
    assert "--samples is 300, it was 200 in the run" in line and "begin anew" in line
    assert "--top-p is 0.9, it was 1.0" in refused(*certify, "--continue", "--top-p", "0.9")
    line = refused(*certify, "--continue", "--draft", "ngram")
    assert '--draft is "ngram", it was' in line
    # How long it may take, and where the result goes, are not what is measured.
    assert paceline(*certify, "--continue", "--seconds", "50").exit_code == 0
    paceline(*bench, "--seconds", "0")
    line = refused(*bench, "--continue", "--temperature", "1")
    assert "--temperature is [1.0], it was [0.0]" in line


def test_another_text_behind_the_same_name_is_noticed(
    certify: list[str], prompts: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("Once upon a time\n---\nThe quick", encoding="utf-8")
    arguments = [str(mine) if word == prompts else word for word in certify]
    paceline(*arguments, "--seconds", "0")
    mine.write_text("Once upon a day\n---\nThe quick", encoding="utf-8")
    assert "the text of the prompts is" in refused(*arguments, "--continue")


def test_another_model_under_the_same_name_is_noticed(certify: list[str], runs: Path) -> None:
    paceline(*certify, "--seconds", "0")
    (file,) = runs.glob("*.json")
    record = json.loads(file.read_text())
    record["model"]["logits"] = [value + 5 for value in record["model"]["logits"]]
    file.write_text(json.dumps(record))
    assert "its weights are others" in refused(*certify, "--continue")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no run of certify to continue"),
        ("{", "cannot continue from"),
        ("[1]", "does not hold a run of paceline certify"),
        ('{"layout": 1, "command": "bench"}', "does not hold a run of paceline certify"),
    ],
)
def test_what_cannot_be_continued(
    certify: list[str], tmp_path: Path, content: str | None, words: str
) -> None:
    state = tmp_path / "s.json"
    if content is not None:
        state.write_text(content)
    line = refused(*certify, "--continue", "--state", str(state))
    assert words in line and str(state) in line and "--continue" in line


def test_damaged_measurements_are_one_line(certify: list[str], runs: Path) -> None:
    paceline(*certify, "--seconds", "0")
    (file,) = runs.glob("*.json")
    record = json.loads(file.read_text())
    record["measured"]["prefixes"] = [{"name": 3}]
    file.write_text(json.dumps(record))
    assert "it is damaged" in refused(*certify, "--continue")


def test_another_versions_measurements_are_refused_in_one_line(
    certify: list[str], runs: Path
) -> None:
    paceline(*certify, "--seconds", "0")
    (file,) = runs.glob("*.json")
    record = json.loads(file.read_text())
    record["measured"]["places"] = record["measured"].pop("prefixes")
    file.write_text(json.dumps(record))
    assert "another version (places is unknown)" in refused(*certify, "--continue")


def test_a_cache_that_cannot_be_written_is_a_note(
    certify: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("paceline.cli.measuring.runs_folder", lambda: blocked / "runs")
    result = paceline(*certify, "--seconds", "0")
    assert result.exit_code == 0, result.output
    assert "note: --continue will not work" in result.stderr
    assert "is a folder" in refused(*certify, "--state", str(tmp_path))
