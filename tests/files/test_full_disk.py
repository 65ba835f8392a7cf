"""Everything that Paceline writes, onto a disk that is full: what was there stays, one line tells.

Planted at each system call, and for real by a limit of the kernel on the size of files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from embedded_target import TargetTrainer
from paceline.cli.main import app
from paceline.errors import WriteError
from paceline.train.medusa import MedusaTrainConfig, MedusaTrainer
from paceline.train.trainer import write_card
from support.full_disk import PLACES, content_of, full_disk, small_files
from support.training_runs import SHORTEST, SMALLEST, options, smallest_run, write_words
from support.written_kinds import KINDS


def check(folder: Path, write: Callable[[int], Any], fault: Callable[[], Any]) -> None:
    """What is written first stays when the second cannot be, and the third can."""
    write(1)
    before = content_of(folder)
    with fault(), pytest.raises(WriteError) as caught:
        write(2)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    assert any(word in message for word in ("No space left", "File too large", "full disk"))
    assert "make room" in message
    assert content_of(folder) == before
    write(2)
    assert content_of(folder) != before
    assert not list(folder.rglob(".paceline-*"))


def planted() -> list[tuple[str, str]]:
    """What can be made again is not forced to the disk."""
    quick = ("cached features", "token stream")
    return [(k, f) for k in KINDS for f in PLACES if k not in quick or f != "fsync"]


@pytest.mark.parametrize(("kind", "fault"), planted())
def test_planted(kind: str, fault: str, tmp_path: Path) -> None:
    check(tmp_path, lambda number: KINDS[kind].write(tmp_path, number), lambda: full_disk(fault))


@pytest.mark.parametrize("kind", KINDS)
def test_for_real(kind: str, tmp_path: Path) -> None:
    case = KINDS[kind]
    check(tmp_path, lambda number: case.write(tmp_path, number), lambda: small_files(case.limit))


# -- training runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words(tmp_path_factory.mktemp("corpus") / "toy.jsonl")


@pytest.fixture
def trainer(corpus: str, tmp_path: Path) -> TargetTrainer:
    return TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")


@pytest.mark.parametrize("fault", [*PLACES, "real"])
def test_a_checkpoint(trainer: TargetTrainer, fault: str) -> None:
    def write(number: int) -> None:
        trainer.step = number
        trainer.save_checkpoint()

    check(trainer.out, write, lambda: small_files(9999) if fault == "real" else full_disk(fault))


@pytest.mark.parametrize("fault", ["fsync", "replace", "real"])
def test_a_trained_model(trainer: TargetTrainer, fault: str) -> None:
    def write(number: int) -> None:
        with torch.no_grad():
            next(trainer.learner.parameters()).add_(number)
        trainer.write_result()

    check(trainer.out, write, lambda: small_files(9999) if fault == "real" else full_disk(fault))


def test_a_card_beside_a_trained_model(trainer: TargetTrainer) -> None:
    trainer.write_result()
    check(trainer.out, lambda n: write_card(trainer, str(n)), lambda: full_disk("write"))


def test_the_tokenizer_that_a_run_begins_with(corpus: str, tmp_path: Path) -> None:
    with small_files(3000), pytest.raises(WriteError, match="the tokenizer"):
        TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")
    assert content_of(tmp_path) == {}
    TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")


def test_a_run_ends_in_one_line_and_goes_on_from_the_old_checkpoint(
    trainer: TargetTrainer, corpus: str
) -> None:
    trainer.train_step()
    trainer.save_checkpoint()
    with small_files(9999), pytest.raises(WriteError, match="cannot write the checkpoint"):
        trainer.run(save_seconds=0)
    again = TargetTrainer(smallest_run(corpus), trainer.out, device="cpu")
    assert again.step == 1
    again.run()


def test_the_heads_of_a_target(trainer: TargetTrainer, corpus: str, tmp_path: Path) -> None:
    trainer.write_result()
    config = MedusaTrainConfig(
        target=str(trainer.folder),
        data=(corpus,),
        seq_len=16,
        max_positions=32,
        heads=1,
        steps=1,
    )
    medusa = MedusaTrainer(config, tmp_path / "medusa", device="cpu")

    def write(number: int) -> None:
        with torch.no_grad():
            for parameter in medusa.head.parameters():
                parameter.add_(number)
        medusa.write_result()

    check(medusa.out, write, lambda: small_files(1000))
    for fault in PLACES[1:]:
        check(medusa.out, write, lambda fault=fault: full_disk(fault))


def test_the_command_line_says_it_in_one_line(corpus: str, tmp_path: Path) -> None:
    out, sizes = tmp_path / "run", options(**SMALLEST, **SHORTEST)
    command = ["train", "draft", "--data", corpus, "--out", str(out), "--steps=2", *sizes]
    with small_files(30_000):  # room for the tokens, not for a checkpoint
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"error: cannot write the checkpoint {out}/checkpoint.pt: File too large"
    )
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
