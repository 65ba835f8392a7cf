"""Every writer replaces what Paceline wrote and refuses the rest: a user's file is never lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from embedded_target import TargetTrainer
from paceline.cli.main import app
from paceline.errors import WriteError
from paceline.files import atomic_folder
from paceline.files.ownership import MANIFEST, claim, force, is_claimed, is_signed, signed
from paceline.kernels import compile as kernels
from paceline.lab.export import export
from paceline.model.names import SMOLLM2, model_folder
from paceline.pull.run import pull
from paceline.train.draft import DraftTrainer
from support.full_disk import content_of
from support.training_runs import smallest_run, write_words
from support.written_kinds import KINDS

MINE = b"my own words\n"


@pytest.fixture(autouse=True)
def nothing_forced() -> Iterator[None]:
    yield
    force(None)


def model(folder: Path, number: int) -> None:
    with atomic_folder(folder / "model", "the model") as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "weights").write_text(str(number))


def exported(folder: Path, number: int) -> None:
    export("openvino", "paceline/tiny", "ngram", draft_length=number, out=folder / "out")


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    **{name: kind.write for name, kind in KINDS.items()},
    "model": model,
    "export": exported,
}


def written(folder: Path, writer: str) -> list[str]:
    WRITERS[writer](folder, 1)
    return [name for name in content_of(folder) if Path(name).name != MANIFEST]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_users_file_in_the_place_of_ours_is_refused(writer: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    names = written(tmp_path / "first", writer)
    assert names
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(MINE)
        with pytest.raises(WriteError) as caught:
            WRITERS[writer](folder, 1)
        message = str(caught.value)
        assert "\n" not in message and Path(name).name in message
        assert "did not write" in message and "--force" in message
        assert content_of(folder) == {name: MINE}


@pytest.mark.parametrize("writer", WRITERS)
def test_ours_is_replaced_and_a_users_is_with_force(writer: str, tmp_path: Path) -> None:
    for name in written(tmp_path, writer):
        before = content_of(tmp_path)
        WRITERS[writer](tmp_path, 2)
        assert content_of(tmp_path) != before or writer == "export"
        (tmp_path / name).write_bytes(MINE)
        told: list[str] = []
        force(told.append)
        WRITERS[writer](tmp_path, 1)
        force(None)
        assert (tmp_path / name).read_bytes() != MINE
        # A folder of cached files that Paceline made is its own, whatever lies in it.
        if writer not in ("cached features", "token stream", "held-out texts", "tuned settings"):
            assert len(told) == 1 and Path(name).name in told[0] and "13 bytes" in told[0]


@pytest.mark.parametrize("what", ["added", "changed", "linked"])
def test_a_folder_with_anything_else_in_it_is_refused(what: str, tmp_path: Path) -> None:
    model(tmp_path, 1)
    inside, other = tmp_path / "model" / "deep", tmp_path / "mine"
    other.write_bytes(MINE)
    if what == "added":
        (inside / "notes.txt").write_bytes(MINE)
    elif what == "changed":
        (inside / "weights").write_text("2")  # of the same size
    else:
        (inside / "link").symlink_to(other)
    before = content_of(tmp_path)
    with pytest.raises(WriteError, match="did not write or that were changed: deep"):
        model(tmp_path, 3)
    assert content_of(tmp_path) == before


def test_two_processes_claim_a_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has seen the other's when it makes its own; a folder of others stays theirs."""
    monkeypatch.setattr(Path, "exists", lambda _: False)
    claim(tmp_path / "features")
    claim(tmp_path / "features")
    assert is_claimed(tmp_path / "features")
    (tmp_path / "mine").mkdir()
    claim(tmp_path / "mine")
    assert not is_claimed(tmp_path / "mine")


def test_a_file_in_the_place_of_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(MINE)
    with pytest.raises(WriteError, match="it is a file; name a folder"):
        model(tmp_path, 1)
    assert content_of(tmp_path) == {"model": MINE}


def test_a_long_list_is_cut_but_not_where_all_of_it_goes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for number in range(9):
        (tmp_path / "model" / f"f{number}").write_bytes(MINE)
    with pytest.raises(WriteError, match=r"f4 \(13 bytes\), 4 more; .*move them away"):
        model(tmp_path, 1)
    told: list[str] = []
    force(told.append)
    model(tmp_path, 1)
    assert len(told) == 1 and all(f"f{number} (13 bytes)" in told[0] for number in range(9))
    assert set(content_of(tmp_path)) == {"model/deep/weights", f"model/{MANIFEST}"}


def test_a_signature_is_of_every_letter(tmp_path: Path) -> None:
    file = tmp_path / "r.md"
    text = signed("# Speed\n\nfast\n")
    assert text.startswith("# Speed\n\nfast\n<!-- Written by Paceline")
    for content, ours in (
        (text, True),
        (text.replace("fast", "slow"), False),
        (text + "more\n", False),
        ("x" + text, False),
        ("", False),
    ):
        file.write_text(content)
        assert is_signed(file) is ours


# -- before the work -------------------------------------------------------------------------------


def planted(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_bytes(MINE)
    return content_of(folder)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("refused only after the work")

    monkeypatch.setattr("paceline.lab.quantize.load_module", loads)
    monkeypatch.setattr("paceline.cli.options.load_llm", loads)
    monkeypatch.setattr(DraftTrainer, "prepare", loads)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    "command",
    [
        "quantize paceline/tiny --to int8 --out {}",
        "train draft --data corpus.jsonl --out {}/.. --steps 2",
        "bench --model paceline/tiny --report {}/thesis.md",
        "tune --model paceline/tiny --out {}/thesis.md --force --report {}/thesis.md",
        "certify --model paceline/tiny --report {}/thesis.md",
        "doctor --model paceline/tiny --report {}/thesis.md",
        "profile --model paceline/tiny --report {}/thesis.md",
        "profile --model paceline/tiny --trace {}/thesis.json",
    ],
)
def test_commands_refuse_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path / "corpus.jsonl")
    folder = tmp_path / "model"
    planted(folder)
    for name in ("thesis.md", "thesis.json"):
        (folder / name).write_bytes(MINE)
    before = content_of(folder)
    words = command.replace(" --force", "").format(*[folder] * 2).split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "thesis" in result.stderr and "--force" in result.stderr
    assert content_of(folder) == before


def test_quantize_with_force_says_what_goes(tmp_path: Path) -> None:
    """The finding: exit status 0, and the user's file was gone."""
    out, few = tmp_path / "model", tmp_path / "few.jsonl"
    few.write_text(json.dumps({"text": "Once upon a time, there was a little girl. " * 9}))
    planted(out)
    words = ["quantize", "paceline/tiny", "--to", "int8", "--out", str(out), "--evaluate", str(few)]
    result = CliRunner().invoke(app, [*words, "--force"])
    assert result.exit_code == 0, result.output
    assert "--force: replacing" in result.stderr and "thesis.txt (13 bytes)" in result.stderr
    assert not (out / "thesis.txt").exists() and (out / "model.safetensors").is_file()
    assert CliRunner().invoke(app, words).exit_code == 0  # all is ours by now


def test_a_trained_model_and_its_card(tmp_path: Path) -> None:
    """The card that training writes beside it belongs to it; a user's words in it do too much."""
    from paceline.train.trainer import write_card

    corpus = write_words(tmp_path / "toy.jsonl")
    trainer = TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")
    trainer.run()
    card = write_card(trainer, "train it")
    TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu").write_result()
    write_card(trainer, "train it")
    card.write_text("mine")
    with pytest.raises(WriteError, match=r"README\.md"):
        TargetTrainer(smallest_run(corpus), tmp_path / "run", device="cpu")
    with pytest.raises(WriteError, match=r"README\.md"):
        trainer.write_result()
    assert card.read_text() == "mine"


def test_pull_and_the_kernels_leave_a_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    before = planted(model_folder(SMOLLM2))
    with pytest.raises(WriteError, match=r"thesis\.txt \(13 bytes\)"):
        pull(SMOLLM2.name)
    assert content_of(model_folder(SMOLLM2)) == before
    built = tmp_path / "native" / "digest"
    monkeypatch.setattr(kernels, "_kept_file", lambda: built / "kernels.so")
    monkeypatch.setattr(kernels, "_run", lambda command: "")
    before = planted(built)
    with pytest.raises(kernels.NativeUnavailableError, match=r"thesis\.txt"):
        kernels.library_file()
    assert content_of(built) == before
