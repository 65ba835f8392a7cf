"""Everything that Paceline writes, onto a disk that is full: what was there stays, one line tells.

Planted at each system call, and for real by a limit of the kernel on the size of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from full_disk import PLACES, content_of, full_disk, small_files
from paceline import tuned
from paceline.cli.main import app
from paceline.core.batch import Commit
from paceline.draft.heads.eagle_format import save_eagle
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead
from paceline.draft.heads.medusa_format import save_medusa
from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads
from paceline.draft.suffix import SuffixDrafter
from paceline.errors import WriteError
from paceline.model.identity import ModelIdentity
from paceline.tools.profiling import trace
from paceline.tools.report.document import Figure, Report, Text
from paceline.train.acceptance import written_texts
from paceline.train.card import write_card
from paceline.train.data import Source, Stream, TokenStreams
from paceline.train.documents import Observed, Windows
from paceline.train.lm import LMTrainer
from paceline.train.medusa import MedusaTrainConfig, MedusaTrainer
from paceline.train.reading import FeatureCache
from paceline.tuned import TunedProfile
from training_runs import SHORTEST, SMALLEST, options, smallest_run, write_words

Write = Callable[[Path, int], Any]  # writes another content for every number


@dataclass(frozen=True)
class Kind:
    """One kind of file: how it is written, and a size that it does not fit into."""

    write: Write
    limit: int = 64


def report(folder: Path, number: int, name: str) -> None:
    made = Report(f"Speed {number}")
    picture = f"<svg xmlns='http://www.w3.org/2000/svg'><title>{number}</title></svg>"
    made.add("Part", Text("x" * 100), Figure("f", lambda: picture, "a"))
    made.write(folder / name)


def suffix(folder: Path, number: int) -> None:
    drafter = SuffixDrafter("cpu", 50)
    drafter._locals[0] = cast(Any, SimpleNamespace(text=[1, 2, *range(3, 30)]))
    drafter.observe([Commit(0, (number,), finish_reason="stop")], cast(Any, None))
    drafter.save(folder / "memory")


def eagle(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    sizes = {"hidden_size": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_size": 8}
    config = EagleConfig(
        version=1,
        vocab_size=20,
        target_hidden_size=8,
        target_layers=2,
        feature_layers=(2,),
        draft_vocab_size=20,
        max_positions=64 + number,
        **sizes,
    )
    save_eagle(EagleHead(config, None), folder)


def medusa(folder: Path, number: int) -> None:
    torch.manual_seed(number)
    save_medusa(MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=20, heads=1 + number)), folder)


def features(folder: Path, number: int) -> None:
    def observe(windows: Windows) -> Observed:
        final = torch.full((1, 3, 4), float(number))
        return Observed(windows.ids, windows.learn, final, final, final, None)

    ids = torch.zeros(1, 3).long()
    windows = Windows(ids, ids == 0, (3,), (number,))
    FeatureCache(folder / "f", observe, nn.Embedding(9, 4)).look(windows)


def held_out(folder: Path, number: int) -> None:
    class Target:
        device = torch.device("cpu")

    written_texts(cast(Any, Target()), cast(Any, None), [], number, 9, (), folder / "held_out.json")


class Recorder:
    """A profiler whose library ends its file early and says nothing when the disk is full."""

    def __init__(self, number: int) -> None:
        self.text = json.dumps({"traceEvents": [number] * 100})

    def export_chrome_trace(self, path: str) -> None:
        try:
            with open(path, "w") as file:
                file.write(self.text)
        except OSError:
            pass


def profile(folder: Path, number: int) -> None:
    made = TunedProfile(
        tuned.VERSION,
        ModelIdentity("m", "llama", 1, 8, 20, 99, "x", (0.5,)),
        tuned.DraftChoice("ngram", "auto", 5),
        tuned.EngineChoice(number, "block"),
        tuned.Measured(1, 0.0, "p", 1, 1.0, 1.0, 1.0, 1.0, 1.0, (), 1, ()),
        tuned.KnownCosts((1,), (1,), ((0.1,),), {"model": tuned.PassCosts((1,), (0.1,))}),
        tuned.MachineIdentity("x", "cpu", 1, "float32", "native", "2", "5", "0", "3", "today"),
    )
    made.write(folder / "p.toml")


def token_stream(folder: Path, number: int) -> None:
    ids = np.full(99, number, np.uint16)
    stream = Stream("t.jsonl", ids, np.ones(99, np.bool_), np.zeros(1, np.int64))
    TokenStreams(folder, None, (), "all").keep(Source(Path("t.jsonl"), 1.0), stream)  # type: ignore[arg-type]


def card(folder: Path, number: int) -> None:
    config = SimpleNamespace(exclude_licenses=(), batch_tokens=8)
    run: Any = SimpleNamespace(config=config, out=folder, result="", sources=[], history=[])
    run.step, run.about = number, lambda: "x" * 99
    write_card(run, "paceline train lm")


KINDS = {
    "profile": Kind(profile),
    "html report": Kind(lambda folder, number: report(folder, number, "r.html")),
    "markdown report": Kind(lambda folder, number: report(folder, number, "r.md")),
    "suffix memory": Kind(suffix),
    "eagle head": Kind(eagle),
    "medusa heads": Kind(medusa),
    "cached features": Kind(features),
    "held-out texts": Kind(held_out, limit=10),
    "card": Kind(card),
    "token stream": Kind(token_stream),
    "trace": Kind(lambda folder, number: trace._export(Recorder(number), folder / "t.json")),
    "packed trace": Kind(
        lambda folder, number: trace._export(Recorder(number), folder / "t.json.gz")
    ),
}


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
    assert not list(folder.rglob("*.partial*"))


def planted() -> list[tuple[str, str]]:
    """What can be made again is not forced to the disk."""
    quick = ("cached features", "token stream")
    return [(k, f) for k in KINDS for f in PLACES if k not in quick or f != "fsync"]


@pytest.mark.parametrize(("kind", "fault"), planted())
def test_planted(kind: str, fault: str, tmp_path: Path) -> None:
    check(tmp_path, lambda number: KINDS[kind].write(tmp_path, number), lambda: full_disk(fault))


@pytest.mark.parametrize("kind", KINDS)
def test_for_real(kind: str, tmp_path: Path) -> None:
    found = KINDS[kind]
    check(tmp_path, lambda number: found.write(tmp_path, number), lambda: small_files(found.limit))


def test_a_real_trace(tmp_path: Path) -> None:
    """The profiler's own library, which ends the file early and says nothing."""
    file = tmp_path / "t.json"
    file.write_text("old")
    with torch.profiler.profile() as recorder:
        for _ in range(50):
            torch.zeros(3)
    with small_files(2000), pytest.raises(WriteError, match=r"t\.json"):
        trace._export(recorder, file)
    assert content_of(tmp_path) == {"t.json": b"old"}


# -- training runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words(tmp_path_factory.mktemp("corpus") / "toy.jsonl")


@pytest.fixture
def trainer(corpus: str, tmp_path: Path) -> LMTrainer:
    return LMTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")


@pytest.mark.parametrize("fault", [*PLACES, "real"])
def test_a_checkpoint(trainer: LMTrainer, fault: str) -> None:
    def write(number: int) -> None:
        trainer.step = number
        trainer.save_checkpoint()

    write(0)  # so that there is a previous one
    check(trainer.out, write, lambda: small_files(9999) if fault == "real" else full_disk(fault))


@pytest.mark.parametrize("fault", ["fsync", "replace", "real"])
def test_a_trained_model(trainer: LMTrainer, fault: str) -> None:
    def write(number: int) -> None:
        trainer.history = [{"step": number}]
        trainer.write_result()

    check(trainer.out, write, lambda: small_files(9999) if fault == "real" else full_disk(fault))


def test_a_card_beside_a_trained_model(trainer: LMTrainer) -> None:
    trainer.write_result()
    check(trainer.out, lambda n: write_card(trainer, str(n)), lambda: full_disk("write"))


def test_the_tokenizer_that_a_run_begins_with(corpus: str, tmp_path: Path) -> None:
    with small_files(3000), pytest.raises(WriteError, match="the tokenizer"):
        LMTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")
    assert content_of(tmp_path) == {}
    LMTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")


def test_a_run_ends_in_one_line_and_goes_on_from_the_old_checkpoint(
    trainer: LMTrainer, corpus: str
) -> None:
    trainer.train_step()
    trainer.save_checkpoint()
    with small_files(9999), pytest.raises(WriteError, match="cannot write the checkpoint"):
        trainer.run(save_seconds=0)
    again = LMTrainer(smallest_run(corpus), trainer.out, device="cpu")
    assert again.step == 1
    again.run()
    assert not list(trainer.out.glob("*previous*")), "a finished run needs one state"


def test_heads_and_the_target_that_they_were_trained_with(
    trainer: LMTrainer, corpus: str, tmp_path: Path
) -> None:
    """Medusa-2 writes two folders that belong together."""
    target = trainer.write_result()
    config = MedusaTrainConfig(
        target=str(target),
        data=(corpus,),
        seq_len=16,
        max_positions=32,
        heads=1,
        joint=True,
        steps=1,
    )
    joint = MedusaTrainer(config, tmp_path / "joint", device="cpu")

    def write(number: int) -> None:
        with torch.no_grad():
            for parameter in (*joint.head.parameters(), *joint.target.parameters()):
                parameter.add_(number)
        joint.write_head(joint.out / "head")

    check(joint.out, write, lambda: small_files(9999))
    for fault in PLACES[1:]:
        check(joint.out, write, lambda fault=fault: full_disk(fault))


def test_the_command_line_says_it_in_one_line(corpus: str, tmp_path: Path) -> None:
    out, sizes = tmp_path / "run", options(vocab_size=280, **SMALLEST, **SHORTEST)
    command = ["train", "lm", "--data", corpus, "--out", str(out), "--steps=2", *sizes]
    with small_files(30_000):  # room for the tokenizer, not for a checkpoint
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"error: cannot write the checkpoint {out}/checkpoint.pt: File too large"
    )
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
