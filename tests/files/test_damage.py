"""Files that were cut off or had bits flipped: refused in one line that names what is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, ModelLoadError, PacelineError
from paceline.draft.heads.checkpoint import read_checkpoint, write_checkpoint
from paceline.draft.heads.eagle_head import load_eagle
from paceline.draft.spec import TargetShape
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.tensorfile import Entry, as_bytes, load_tensors, read_table
from support.damages import damages
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
    """Receipts hash files."""
    tensors = {"b": torch.ones(3), "a": torch.arange(4, dtype=torch.int8)}
    first = as_bytes(tensors)
    assert all(as_bytes(tensors) == first for _ in range(20))
    file = tmp_path / "w.safetensors"
    file.write_bytes(first)
    assert torch.equal(load_tensors(file, ["a"])["a"], tensors["a"])


def test_the_table_of_a_file(head: Path) -> None:
    table = read_table(head / "head.safetensors")
    assert table["second.weight"] == Entry("BF16", (8, 5))
    assert {key: entry.nbytes for key, entry in table.items()} == {
        key: tensor.nbytes for key, tensor in TENSORS.items()
    }
    assert Entry("BOOL", (3,)).nbytes == 3 and Entry("F8_E4M3", (2, 3)).nbytes == 6


def test_what_is_saved_is_read_back_and_others_read_it_too(head: Path) -> None:
    for read in (load(head), load_file(head / "head.safetensors")):
        assert read.keys() == TENSORS.keys()
        assert all(torch.equal(read[key], value) for key, value in TENSORS.items())


@pytest.mark.parametrize("end", [-1, 60, 3, 0])
def test_a_cut_is_told_in_one_line(head: Path, end: int) -> None:
    file = head / "head.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ModelLoadError) as caught:
        load(head)
    assert f"{file} is damaged" in str(caught.value)


def test_any_damage_is_one_line_or_another_number(head: Path) -> None:
    file = head / "head.safetensors"
    for content in damages(file.read_bytes(), 1, 60, 400):
        file.write_bytes(content)
        try:
            load(head)
        except ModelLoadError as error:
            assert str(head) in str(error) and "\n" not in str(error)


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


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture
def draft_folder(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A draft as ``paceline train`` writes it."""
    folder = tmp_path / "draft"
    shutil.copytree(tiny_pair.draft, folder)
    return folder


def test_a_model_that_is_cut(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair.target, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        LLM(str(folder), draft="none")


def test_a_draft_of_no_numbers(tiny_pair: TinyPair, draft_folder: Path) -> None:
    file = draft_folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds"
    ):
        LLM(tiny_pair.target, str(draft_folder))


def test_any_damage_to_a_models_folder(draft_folder: Path) -> None:
    for seed, file in enumerate(sorted(draft_folder.iterdir())):
        before = file.read_bytes()
        for content in damages(before, seed, 6, 10):
            file.write_bytes(content)
            try:
                load_tokenizer(str(draft_folder))
                load_module(str(draft_folder), "float32", "cpu")
            except PacelineError as error:
                assert "\n" not in str(error)
        file.write_bytes(before)


@pytest.mark.parametrize("layers", [2**31, 0])
def test_layers_that_the_weights_cannot_have(draft_folder: Path, layers: int) -> None:
    """Transformers would make such a model before it looks at the weights."""
    file = draft_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers}))
    with pytest.raises(ModelLoadError, match=f"states {layers} layers, but has .* tensors"):
        load_module(str(draft_folder), "float32", "cpu")


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
