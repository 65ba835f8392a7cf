"""``paceline train sample``: records, resumption, and a draft trained on them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.cli import train
from paceline.errors import DataError
from paceline.request import progress
from support.command_lines import paceline
from support.tiny_models import SENTENCES, TinyPair


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [
        {"messages": [{"role": "user", "content": f"{text} {n}"}], "license": "MIT", "source": "us"}
        for n in range(4)
        for text in SENTENCES
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "{bad\n")
    return str(path)


def arguments(pair: TinyPair, prompts: str, out: Path, *more: str) -> list[str]:
    options = ["--max-tokens=6", "--max-batch-size=3", "--dtype=float32", "--threads=1"]
    command = ["train", "sample", "--model", str(pair.target), "--data", prompts]
    return [*command, "--out", str(out), *options, *more]


def records_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_the_targets_own(tiny_pair: TinyPair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    result = paceline(*arguments(tiny_pair, prompts, out))
    assert result.exit_code == 0, result.output
    assert "1 line left out, 20 used (line 21: it is not JSON)" in result.stderr
    assert f"20 records in {out}" in result.stderr
    records = records_of(out)
    assert sorted(record["job"] for record in records) == list(range(20))
    llm = LLM(str(tiny_pair.target), draft="none", dtype="float32")
    from paceline import SamplingParams

    for record in records[:4]:
        prompt, answer = record["ids"][: record["prompt"]], record["ids"][record["prompt"] :]
        (expected,) = llm.generate([prompt], SamplingParams(max_tokens=6))
        assert answer == expected.token_ids
        assert record["finish"] == expected.finish_reason
        assert (record["license"], record["source"]) == ("MIT", "us")
    assert not list(tmp_path.glob("*.partial*"))
    again = paceline(*arguments(tiny_pair, prompts, out))
    assert again.exit_code == 0
    assert "exists already" in again.stderr


def test_the_end_token_is_written(tiny_pair: TinyPair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    more = ("--temperature=1", "--top-p=0.99", "--max-tokens=200", "--num-prompts=12")
    result = paceline(*arguments(tiny_pair, prompts, out, *more))
    assert result.exit_code == 0, result.output
    records = records_of(out)
    assert len(records) == 12
    ended = [record for record in records if record["finish"] == "stop"]
    assert ended, "a random model of 320 tokens ends some of 12 answers within 200"
    llm = LLM(str(tiny_pair.target), draft="none", dtype="float32")
    assert all(record["ids"][-1] in llm.end_tokens for record in ended)


def test_records_are_of_the_prompts_that_a_file_had(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed file is other work, which does not resume the records of the old one."""
    keys: list[str] = []

    def begun(out: Path, what: str, key: str) -> None:
        keys.append(key)
        raise DataError(what)

    monkeypatch.setattr(train, "LongRecord", begun)
    file = tmp_path / "prompts.jsonl"
    for content in ("a", "", "b"):
        if content:
            file.write_text(json.dumps({"text": content}))
        assert paceline(*arguments(tiny_pair, str(file), tmp_path / "out")).exit_code == 1
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.slow  # a process that is killed
def test_a_killed_run_goes_on(tiny_pair: TinyPair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    partial = tmp_path / "answers.jsonl.partial"
    code = (
        "import os, signal, sys\n"
        "from paceline.files import LongRecord\n"
        "from paceline.cli.main import app\n"
        "add = LongRecord.add\n"
        "def killed(self, line):\n"
        "    if self.lines == 7:\n"
        "        self._file.write(line.encode()[:20])\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    add(self, line)\n"
        "LongRecord.add = killed\n"
        "app(sys.argv[1:])"
    )
    command = arguments(tiny_pair, prompts, out)
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(partial.read_bytes().splitlines()) == 8  # the last one cut
    other = paceline(*command, "--temperature=1")
    assert other.exit_code == 1
    assert "records of a command with other options" in other.stderr
    result = paceline(*command)
    assert result.exit_code == 0, result.output
    assert "resuming after 7 records" in result.stderr
    records = records_of(out)
    assert sorted(record["job"] for record in records) == list(range(20))


def test_it_says_what_it_does(
    tiny_pair: TinyPair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr is no terminal, as it advances."""
    monkeypatch.undo()  # what the other tests do not show
    for name in ("_BEGIN_SECONDS", "_ADVANCE_SECONDS"):
        monkeypatch.setattr(progress, name, 0.01)
    command = arguments(tiny_pair, prompts, tmp_path / "a.jsonl", "--max-tokens=120")
    done = paceline(*command)
    assert done.exit_code == 0, done.output
    assert "loading " in done.stderr
    assert re.search(
        r"writing answers: \d+ of 20 records, [\d,]+ tokens, [\d,]+ tokens/s", done.stderr
    )
    assert not done.stdout


def test_a_draft_learns_from_the_answers(tiny_pair: TinyPair, prompts: str, tmp_path: Path) -> None:
    answers, out = tmp_path / "answers.jsonl", tmp_path / "draft"
    result = paceline(*arguments(tiny_pair, prompts, answers, "--max-tokens=40"))
    assert result.exit_code == 0, result.output
    sizes = ["--hidden-size=16", "--layers=1", "--heads=1", "--kv-heads=1", "--ffn-size=32"]
    schedule = ["--seq-len=32", "--batch-tokens=64", "--micro-tokens=64", "--steps=3", "--warmup=1"]
    held_out = ["--held-out=2", "--held-out-tokens=6", "--long-every=0", "--threads=1"]
    files = ["--model", str(tiny_pair.target), "--data", str(answers), "--valid", prompts]
    options = [*files, "--out", str(out), "--json", *sizes, *schedule, *held_out]
    result = paceline("train", "draft", *options)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["config"]["loss_on"] == "assistant"
    assert set(record["acceptance"]) == {"prompts"}
    assert "step 3: " in result.stderr
    assert "tokens per target step (prompts " in result.stderr
