"""``paceline train lm``: options, output, interruption and resumption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

SIZES = [
    f"--{name}={value}"
    for name, value in {
        "vocab-size": 280,
        "hidden-size": 16,
        "layers": 1,
        "heads": 1,
        "kv-heads": 1,
        "ffn-size": 32,
        "max-positions": 32,
        "seq-len": 16,
        "batch-tokens": 64,
        "micro-tokens": 64,
        "warmup": 1,
    }.items()
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "toy.jsonl"
    record = {"text": "The dog saw the cat and the cat saw the dog.", "license": "MIT"}
    path.write_text("".join(json.dumps(record) + "\n" for _ in range(40)))
    return str(path)


def test_a_run_ends_with_a_json_line_and_a_card(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "lm", "--data", corpus, "--valid", corpus, "--out", str(out), *SIZES]
    result = CliRunner().invoke(app, [*arguments, "--steps", "3", "--eval-every", "2", "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["steps"] == 3
    assert record["model"] == str(out / "model")
    assert set(record["validation"]) == {"toy"}
    assert record["config"]["hidden_size"] == 16
    assert Path(record["card"]).read_text().startswith("# Model card")
    assert (out / "model" / "model.safetensors").is_file()

    again = CliRunner().invoke(app, [*arguments, "--steps", "4"])
    assert again.exit_code == 0, again.output
    assert "resuming at step 3 of 4" in again.stderr


def test_ctrl_c_saves_and_the_same_command_resumes(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "lm", "--data", corpus, "--valid", corpus, "--out", str(out), *SIZES]
    command = [sys.executable, "-m", "paceline.cli.main", *arguments]
    with subprocess.Popen(
        [*command, "--steps", "1000000", "--eval-every", "5"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if "validation" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        code = process.wait(timeout=60)
    assert code == 130, rest
    last = rest.splitlines()[-1]
    assert last.startswith("interrupted at step ")
    assert "run the same command again to resume" in last
    assert "Traceback" not in rest
    step = int(last.split(";")[0].split()[-1])
    assert step >= 5
    # A shorter schedule than the step reached: the resumed run has nothing left but to finish.
    result = CliRunner().invoke(app, [*arguments, "--steps", str(step), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == step
