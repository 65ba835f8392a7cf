"""``paceline train eagle3`` and ``train eagle``: options, output, errors, interruption."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from paceline.train.checkpoint import lock_folder
from paceline.train.eagle import EagleTrainer
from support.command_lines import paceline, refusals
from support.tiny_models import SENTENCES, TinyPair
from support.training_runs import check_interrupt, options, write_records

SIZES = options(seq_len=24, long_every=0, batch_tokens=48, micro_tokens=48, warmup=1)
SIZES += options(held_out=2, held_out_tokens=6, threads=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_records(tmp_path_factory.mktemp("corpus") / "toy.jsonl", SENTENCES * 3)


def arguments(kind: str, target: str, corpus: str, out: Path) -> list[str]:
    flags = ["--ttt-steps=2"] if kind == "eagle3" else []
    files = ["--data", corpus, "--valid", corpus, "--model", target, "--out", str(out)]
    return ["train", kind, *files, *SIZES, *flags]


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_run_ends_with_a_head_a_card_and_a_json_line(
    kind: str, tiny_pair: TinyPair, corpus: str, tmp_path: Path
) -> None:
    command = arguments(kind, tiny_pair.target, corpus, tmp_path / "run")
    result = paceline(*command, "--steps", "3", "--eval-every", "2", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["steps"] == 3
    assert record["mean_accepted_length"] >= 1
    assert set(record["acceptance"]) == {"toy"}
    head = Path(record["head"])
    assert json.loads((head / "config.json").read_text())["hidden_size"] == 32
    card = (head / "README.md").read_text()
    assert card.startswith("# Model card")
    assert f"{record['parameters']:,} parameters" in card
    assert "| `toy.jsonl` | 1 | MIT 15 |" in card
    assert "| 3 | " in card and "| toy | " in card and "| all | " in card
    assert "tokens per target step (toy " in result.stderr
    assert not list((tmp_path / "run").rglob("*.partial*"))

    spec = f"{'eagle3' if kind == 'eagle3' else 'eagle2'}:{head}"
    written = paceline(
        "generate", "The dog", "--model", tiny_pair.target, "--draft", spec, "--max-tokens", "4"
    )
    assert written.exit_code == 0, written.output

    again = paceline(*command, "--steps", "4")
    assert again.exit_code == 0, again.output
    assert "resuming at step 3 of 4" in again.stderr
    anew = paceline(*command, "--steps", "1", "--force", "--json")
    assert anew.exit_code == 0, anew.output
    assert "resuming" not in anew.stderr and json.loads(anew.stdout)["steps"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    refusals("""
    --feature-layers 2,9 | feature layers [9] do not exist
    --feature-layers two | it must be numbers, as in 2,6,11
    --data no.jsonl | data file no.jsonl does not exist
    --data tests | data file tests is a folder
    --lr -1 | Invalid value for '--lr':
    --model ./nowhere | ./nowhere
    """),
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tiny_pair: TinyPair, corpus: str, tmp_path: Path, changes: list[str], message: str
) -> None:
    out = tmp_path / "run"
    command = arguments("eagle3", tiny_pair.target, corpus, out)
    result = paceline(*command, *changes)
    assert result.exit_code != 0
    said = " ".join(result.stderr.replace("│", " ").split())
    assert message in (said or str(result.exception))
    assert not out.exists()


def test_held_out_texts_are_read_before_the_first_step(
    tiny_pair: TinyPair, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.jsonl").touch()
    command = arguments("eagle3", tiny_pair.target, corpus, tmp_path / "run")
    monkeypatch.setattr(EagleTrainer, "train_step", None)
    result = paceline(*command, "--valid", str(tmp_path / "empty.jsonl"))
    assert result.exit_code == 1 and "empty.jsonl has no prompt" in result.stderr


def test_a_loss_that_is_not_finite_ends_the_run(
    tiny_pair: TinyPair, corpus: str, tmp_path: Path
) -> None:
    command = arguments("eagle3", tiny_pair.target, corpus, tmp_path / "run")
    result = paceline(*command, "--lr=1e30", "--adam-lr=1e30", "--steps=9", "--save-seconds=0")
    assert result.exit_code == 1 and "use a lower --lr and --adam-lr" in result.stderr
    assert not (tmp_path / "run" / "head").exists()


def test_a_folder_is_one_runs_alone(tiny_pair: TinyPair, corpus: str, tmp_path: Path) -> None:
    command = arguments("eagle3", tiny_pair.target, corpus, tmp_path / "run")
    with lock_folder(tmp_path / "run"):
        result = paceline(*command, "--steps", "1")
    assert result.exit_code == 1 and "another training is running in" in result.stderr
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_a_signal_saves_and_the_same_command_resumes(
    sent: signal.Signals,
    tiny_pair: TinyPair,
    corpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: test_train.py."""
    command = arguments("eagle3", tiny_pair.target, corpus, tmp_path / "run")
    assert check_interrupt(command, EagleTrainer, 6, sent, monkeypatch) == 7
