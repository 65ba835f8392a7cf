"""Medusa checkpoints: reading and writing, and the errors for wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, load_medusa, save_medusa
from paceline.draft.spec import TargetShape
from paceline.errors import ModelLoadError, WriteError
from support.full_disk import full_disk

WIDTH, VOCAB, DEPTH = 8, 20, 4
TARGET = TargetShape(WIDTH, VOCAB, DEPTH)


def random_heads(**changes) -> MedusaHeads:
    values = {"hidden_size": WIDTH, "vocab_size": VOCAB, "heads": 3, "layers": 2, **changes}
    heads = MedusaHeads(MedusaConfig(**values))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


def logits(heads: MedusaHeads) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    lm_head = torch.randn(VOCAB, WIDTH, generator=generator)
    rows = torch.randn(5, WIDTH, generator=generator)
    return heads(rows, lambda x: x @ lm_head.T)


def public_folder(folder: Path, heads: MedusaHeads, suffix: str = "pt", **config) -> Path:
    """As FasterDecoding/Medusa writes them: a state dict and a short config."""
    folder.mkdir(exist_ok=True)
    if suffix == "pt":
        torch.save(heads.state_dict(), folder / "medusa_lm_head.pt")
    else:
        save_file(heads.state_dict(), folder / "medusa_lm_head.safetensors")
    values = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some/7b"}
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


KINDS = [
    {},
    {"shared_head": True},
    {"bias": False},
    {"draft_vocab_size": 6},
    {"shared_head": True, "draft_vocab_size": 6},
    {"layers": 0, "bias": False},
    {"accuracy": ((0.5, 0.25), (0.375,)), "base_model": "some/7b"},
]


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_written_heads_are_read_back(tmp_path: Path, changes: dict) -> None:
    heads = random_heads(**changes)
    if heads.token_map is not None:
        heads.token_map.copy_(torch.tensor([3, 1, 19, 7, 0, 12]))
    save_medusa(heads, tmp_path, target_layers=4)
    read = load_medusa(str(tmp_path), TARGET)
    assert read.config == heads.config
    assert torch.equal(logits(read), logits(heads))
    assert not list(tmp_path.glob("*.partial"))


def test_the_written_names_are_the_public_ones(tmp_path: Path) -> None:
    save_medusa(random_heads(heads=2, layers=1), tmp_path)
    assert set(load_file(tmp_path / "medusa_lm_head.safetensors")) == {
        *("0.0.linear.weight", "0.0.linear.bias", "0.1.weight"),
        *("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)


def test_a_full_disk_leaves_the_former_heads(tmp_path: Path) -> None:
    heads = random_heads()
    save_medusa(heads, tmp_path)
    with full_disk("write"), pytest.raises(WriteError, match="No space left"):
        save_medusa(random_heads(heads=1), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "medusa_lm_head.safetensors",
        "config.json",
    }
    assert torch.equal(logits(load_medusa(str(tmp_path), TARGET)), logits(heads))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_public_checkpoints_of_either_kind(tmp_path: Path, suffix: str) -> None:
    heads = random_heads()
    read = load_medusa(str(public_folder(tmp_path, heads, suffix)), TARGET)
    assert read.config.base_model == "some/7b"
    assert torch.equal(logits(read), logits(heads))


def test_a_config_may_name_fewer_heads(tmp_path: Path) -> None:
    heads = random_heads()
    folder = public_folder(tmp_path, heads, medusa_num_heads=2)
    assert torch.equal(logits(load_medusa(str(folder), TARGET)), logits(heads)[:2])


def test_the_names_of_vllm(tmp_path: Path) -> None:
    heads = random_heads(bias=False)
    tensors = {}
    for key, value in heads.state_dict().items():
        head, layer, *rest = key.split(".")
        name = f"blocks.{head}.layers.{layer}.weight" if rest[0] == "linear" else ""
        tensors["medusa_heads." + (name or f"lm_heads.{head}.weight")] = value
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"num_heads": 3, "num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load_medusa(str(tmp_path), TARGET)), logits(heads))


def test_vocabulary_layers_are_cut_to_the_token_map(tmp_path: Path) -> None:
    """vLLM allows whole layers beside a token map; unknown tokens get minus infinity."""
    heads, ids = random_heads(), torch.tensor([4, 2, 9])
    save_file({**heads.state_dict(), "token_map": ids}, tmp_path / "model.safetensors")
    config = {"medusa_num_heads": 3, "vocab_size": VOCAB, "truncated_vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = logits(load_medusa(str(tmp_path), TARGET))
    assert torch.allclose(got[..., ids], logits(heads)[..., ids])
    assert torch.isneginf(got).sum() == got.numel() * (VOCAB - 3) // VOCAB


def broken(folder: Path, case: str) -> None:
    heads = random_heads()
    public_folder(folder, heads)
    tensors, file = heads.state_dict(), folder / "medusa_lm_head.pt"
    match case:
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "no weights":
            file.unlink()
        case "damaged":
            file.write_bytes(b"what")
        case "no name":  # torch raises a UnicodeDecodeError
            file.write_bytes(b"\x80\x02c\xcc\nx\n.")
        case "code":
            torch.save({"0.0.linear.weight": print}, file)
        case "eagle":
            torch.save({"fc.weight": torch.zeros(2, 2), "midlayer.x": torch.zeros(2)}, file)
        case "model":
            torch.save({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, file)
        case "missing":
            torch.save({k: v for k, v in tensors.items() if k != "1.0.linear.bias"}, file)
        case "no vocabulary layer":  # of the first head alone
            torch.save({k: v for k, v in tensors.items() if k != "0.2.weight"}, file)
        case "shape":
            torch.save({**tensors, "1.0.linear.bias": torch.zeros(3)}, file)
        case "too few":
            public_folder(folder, heads, medusa_num_heads=5)
        case "other depth":
            public_folder(folder, heads, medusa_num_layers=1)
        case "no map":
            public_folder(folder, heads, vocab_size=VOCAB, truncated_vocab_size=5)
        case "bad map":
            torch.save({**tensors, "token_map": torch.tensor([1, 99])}, file)
            config = {"vocab_size": VOCAB, "truncated_vocab_size": 2}
            (folder / "config.json").write_text(json.dumps(config))
        case "accuracy":
            public_folder(folder, heads, paceline_accuracy=[[7]])
        case "target depth":
            public_folder(folder, heads, paceline_target_layers=9)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no config", "no config.json"),
        ("bad config", "not valid JSON"),
        ("no weights", "has no Medusa heads"),
        ("damaged", "cannot be read as weights"),
        ("no name", "cannot be read as weights"),
        ("code", "cannot be read as weights"),
        ("eagle", "an EAGLE-3 head; use --draft eagle3:"),
        ("model", "a language model"),
        ("missing", "lacks the weight 1.0.linear.bias"),
        ("no vocabulary layer", "holds no first Medusa head"),
        ("shape", "has 1.0.linear.bias of shape \\[3\\] where \\[8\\] is due"),
        ("too few", "asks for 5 heads of 2 blocks, but the weights hold 3 of 2"),
        ("other depth", "asks for 3 heads of 1 blocks"),
        ("no map", "no token_map"),
        ("bad map", "does not name 2 tokens below 20"),
        ("accuracy", "paceline_accuracy"),
        ("target depth", "number of layers 9, but this one has 4"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, case: str, message: str) -> None:
    broken(tmp_path, case)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_medusa(str(tmp_path), TARGET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("width", "vocab", "message"),
    [
        (WIDTH + 1, VOCAB, "hidden size 8, but this one has 9"),
        (WIDTH, VOCAB + 1, "vocabulary size 20, but this one has 21"),
    ],
)
def test_heads_of_another_target(tmp_path: Path, width: int, vocab: int, message: str) -> None:
    public_folder(tmp_path, random_heads())
    with pytest.raises(ModelLoadError, match=message):
        load_medusa(str(tmp_path), TargetShape(width, vocab, DEPTH))


NOWHERE = {
    "./no/such/heads": "does not exist",
    "nobody/heads-that-are-not-there": "no local folder, and the model hub does not deliver it",
    "paceline/other": "no built-in model",
}


@pytest.mark.parametrize(("name", "message"), NOWHERE.items())
def test_heads_that_are_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_medusa(name, TARGET)
