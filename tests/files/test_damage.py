"""Files that were cut off or had bits flipped: refused in one line that names what is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline import LLM, ModelLoadError, PacelineError
from paceline.draft.heads.checkpoint import read_checkpoint, write_checkpoint
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.spec import TargetShape
from paceline.lab.doctor import examine
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.tensorfile import SUMS, add_checksums, as_bytes, read_table, verify
from support.damages import damages, flipped
from support.random_heads import write_eagle
from support.tiny_models import TinyPair

TENSORS = {
    "first.weight": torch.arange(60, dtype=torch.float32).reshape(6, 10),
    "second.weight": torch.linspace(-1, 1, 40).bfloat16().reshape(8, 5),
    "third.count": torch.tensor(7),
}
CONFIG = {"hidden_size": 10}


# -- files of tensors ------------------------------------------------------------------------------


@pytest.fixture
def head(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, "head.safetensors", TENSORS, CONFIG)
    return tmp_path


def load(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(str(folder), ("head.safetensors",), "test head").tensors


def test_the_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    """Receipts hash files, and the metadata lay in another order every other time."""
    tensors = {"b": torch.ones(3), "a": torch.arange(4, dtype=torch.int8)}
    more = {"made by": 'h\u00e4nd "quoted"\n', "z": "1"}
    first = as_bytes(tensors, more)
    assert all(as_bytes(tensors, more) == first for _ in range(20))
    file = tmp_path / "w.safetensors"
    file.write_bytes(first)
    with safe_open(file, framework="pt") as opened:
        known = opened.metadata()
        assert known.keys() == {"format", *more, SUMS} and known.items() >= more.items()
        assert torch.equal(opened.get_tensor("a"), tensors["a"])
    assert verify(file)


def test_what_is_saved_is_read_back_and_others_read_it_too(head: Path) -> None:
    for read in (load(head), load_file(head / "head.safetensors")):
        assert read.keys() == TENSORS.keys()
        assert all(torch.equal(read[key], value) for key, value in TENSORS.items())


@pytest.mark.parametrize("name", TENSORS)
def test_a_flipped_bit_names_the_tensor(head: Path, name: str) -> None:
    file = head / "head.safetensors"
    content, entry = file.read_bytes(), read_table(file).entries[name]
    for byte in (entry.start, (entry.start + entry.end) // 2, entry.end - 1):
        file.write_bytes(flipped(content, 8 * byte + byte % 8))
        with pytest.raises(ModelLoadError, match=f"tensor {name} does not match its checksum"):
            load(head)


@pytest.mark.parametrize("name", TENSORS)
def test_a_cut_names_the_tensor(head: Path, name: str) -> None:
    file = head / "head.safetensors"
    content, entry = file.read_bytes(), read_table(file).entries[name]
    file.write_bytes(content[: entry.end - 1])
    with pytest.raises(ModelLoadError) as caught:
        load(head)
    assert f"{file} is damaged: tensor {name} is cut" in str(caught.value)


def test_any_damage_is_one_line_or_none_at_all(head: Path) -> None:
    file = head / "head.safetensors"
    for content in damages(file.read_bytes(), 1, 60, 400):
        file.write_bytes(content)
        try:
            read = load(head)
        except ModelLoadError as error:
            assert str(file) in str(error) and "\n" not in str(error)
        else:  # a bit that means nothing, as in the table's blanks
            assert all(torch.equal(read[key], value) for key, value in TENSORS.items())


def test_files_of_others_carry_no_checksums_and_are_read(head: Path) -> None:
    file = head / "head.safetensors"
    save_file(TENSORS, file)
    assert verify(file) is False
    assert load(head).keys() == TENSORS.keys()


def test_a_tensor_that_was_added_or_lost(head: Path) -> None:
    file = head / "head.safetensors"
    sums = json.loads(json.dumps({SUMS: json.dumps(dict(read_table(file).sums))}))
    save_file({**TENSORS, "other": torch.zeros(2)}, file, sums)
    with pytest.raises(ModelLoadError, match="tensor other has no checksum"):
        load(head)
    save_file({"first.weight": TENSORS["first.weight"]}, file, sums)
    with pytest.raises(ModelLoadError, match=r"tensor second\.weight is missing"):
        load(head)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_numbers_that_are_none_are_refused_by_name(
    tmp_path: Path, value: float, suffix: str
) -> None:
    tensors = {key: tensor.clone() for key, tensor in TENSORS.items()}
    tensors["second.weight"][3, 2] = value
    file = f"head.{suffix}"
    write_checkpoint(tmp_path, "head.safetensors", tensors, CONFIG)
    if suffix == "pt":
        torch.save(tensors, tmp_path / file)
    with pytest.raises(ModelLoadError, match=r"tensor second\.weight holds NaN or infinity"):
        read_checkpoint(str(tmp_path), (file,), "test head")


def test_sealing_changes_nothing_but_the_metadata(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(TENSORS, file, {"format": "pt", "other": "note"})
    add_checksums(file)
    assert verify(file) is True
    assert all(torch.equal(load_file(file)[key], value) for key, value in TENSORS.items())
    assert all(
        entry.start % 8 == 0
        for entry in [min(read_table(file).entries.values(), key=lambda e: e.start)]
    )
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["other"] == "note"


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A draft as ``paceline train`` writes it."""
    folder = tmp_path / "draft"
    shutil.copytree(tiny_pair.draft, folder)
    add_checksums(folder / "model.safetensors")
    return folder


def test_a_model_with_a_flipped_bit(sealed: Path) -> None:
    file = sealed / "model.safetensors"
    entry = read_table(file).entries["model.norm.weight"]
    file.write_bytes(flipped(file.read_bytes(), 8 * entry.start + 3))
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight does not match"):
        load_module(str(sealed), "float32", "cpu")
    findings = [item for item in examine(str(sealed)) if item.code == "weights-damaged"]
    assert len(findings) == 1 and "model.norm.weight" in findings[0].text


def test_large_models_are_left_to_doctor(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.loading._VERIFIED_BYTES", 1000)
    file = sealed / "model.safetensors"
    entry = read_table(file).entries["model.norm.weight"]
    file.write_bytes(flipped(file.read_bytes(), 8 * entry.start + 3))
    load_module(str(sealed), "float32", "cpu")
    assert "weights-damaged" in {item.code for item in examine(str(sealed))}


def test_a_model_of_others_that_is_cut_names_the_tensor(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair.target, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"tensor model\.\S+ is cut"):
        LLM(str(folder), draft="none")


def test_a_draft_of_no_numbers(tiny_pair: TinyPair, sealed: Path) -> None:
    file = sealed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds"
    ):
        LLM(tiny_pair.target, str(sealed))


def test_any_damage_to_a_models_folder(sealed: Path) -> None:
    whole = {
        key: value.clone()
        for key, value in load_module(str(sealed), "float32", "cpu").state_dict().items()
    }
    for seed, file in enumerate(sorted(sealed.iterdir())):
        before = file.read_bytes()
        for content in damages(before, seed, 6, 10):
            file.write_bytes(content)
            try:
                load_tokenizer(str(sealed))
                read = load_module(str(sealed), "float32", "cpu").state_dict()
            except PacelineError as error:
                assert "\n" not in str(error)
            else:
                if file.suffix == ".safetensors":
                    assert all(torch.equal(read[key], value) for key, value in whole.items())
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("num_hidden_layers", 2**31), ("intermediate_size", 2**40), ("vocab_size", 2**62)],
        *[("num_hidden_layers", 0), ("intermediate_size", -1), ("hidden_size", 0)],
    ],
)
def test_sizes_that_the_weights_cannot_have(sealed: Path, key: str, value: int) -> None:
    """Transformers would make such a model before it looks at the weights."""
    file = sealed / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    why = "more than its weights hold" if value > 0 else "which is no size"
    with pytest.raises(ModelLoadError, match=f"{value} for {key}, {why}; copy its files again"):
        load_module(str(sealed), "float32", "cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", 5),
        ("rope_theta", "x"),
        ("rms_norm_eps", [1]),
        ("intermediate_size", 2**63 - 1),
        ("intermediate_size", 2**40),
    ],
)
def test_a_value_of_a_heads_config(
    tiny_pair: TinyPair, tmp_path: Path, key: str, value: object
) -> None:
    folder = Path(write_eagle(tmp_path, tiny_pair.target, 1))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ModelLoadError) as caught:
        load_eagle(str(folder), TargetShape(32, 320, 3))
    assert str(folder) in str(caught.value)


def test_what_a_file_says_adds_no_line_to_a_message() -> None:
    assert str(ModelLoadError("no key 'a\nb\u2028c'")) == "no key 'a b c'"
