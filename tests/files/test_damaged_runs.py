"""Training goes on from what is whole, and makes the rest again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_target import TargetTrainer
from paceline import ConfigError
from paceline.train.acceptance import load_held_out_texts
from paceline.train.checkpoint import read_state, write_state
from paceline.train.configs import DraftConfig
from paceline.train.data import Windows
from paceline.train.reading import FeatureCache, TargetOutputs
from support.damages import damages
from support.tiny_models import write_tiny_model
from support.training_runs import smallest_run, write_words

# -- the state of a training run -------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    tensor = torch.arange(8.0) + step
    return {
        "kind": "TargetTrainer",
        "config": {"lr": 0.1, "data": ("x",)},
        "optimizers": [{"masters": [tensor], "optimizers": [{"state": {0: tensor + 2}}]}],
        "step": step,
        "history": [{"step": step, "loss": float("nan")}],
    }


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


def test_a_state_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    assert read_state(file) is None
    write_state(file, state(1))
    write_state(file, state(2))
    assert same(read_state(file), state(2))


def test_any_damage_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    write_state(file, state(2))
    refused = 0
    for content in (b"half", *damages(file.read_bytes(), 3, 40, 300)):
        file.write_bytes(content)
        try:
            assert same(read_state(file), state(2))
        except ConfigError as error:
            refused += 1
            assert str(error).startswith(f"{file} is damaged") and "delete it" in str(error)
    assert refused > 150


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words(tmp_path_factory.mktemp("corpus") / "toy.jsonl")


def new_trainer(corpus: str, out: Path) -> TargetTrainer:
    return TargetTrainer(smallest_run(corpus), out, device="cpu")


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-30]])
def test_a_damaged_token_stream_is_made_again(
    corpus: str, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = new_trainer(corpus, tmp_path)
    (file,) = (tmp_path / "tokens").glob("*.safetensors")
    before = file.read_bytes()
    file.write_bytes(damage(before))
    again = new_trainer(corpus, tmp_path)
    assert (again.documents.streams[0].ids == first.documents.streams[0].ids).all()
    assert file.read_bytes() == before


# -- caches of training, which are made again ------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_damaged_features_are_looked_at_again(tmp_path: Path, seed: int) -> None:
    looked = []

    def run_target(ids: torch.Tensor, loss_mask: torch.Tensor, _: object) -> TargetOutputs:
        looked.append(1)
        final = torch.ones(1, 3, 4)
        return TargetOutputs(ids, loss_mask, 2 * final, final, None)

    cache = FeatureCache(tmp_path / "features", run_target, torch.device("cpu"), 4)
    ids = torch.zeros(1, 3, dtype=torch.long)
    windows = Windows(ids, torch.ones_like(ids, dtype=torch.bool), (3,))
    first = cache.get(windows)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(damages(file.read_bytes(), seed, 1, 0)[seed % 2])
    assert torch.equal(cache.get(windows).features, first.features)


def test_runs_of_different_precision_share_features(tmp_path: Path) -> None:
    """Of two texts, one is in the folder, from a run in bf16 (on another processor)."""

    def cache_of(dtype: torch.dtype) -> FeatureCache:
        def run_target(ids: torch.Tensor, loss_mask: torch.Tensor, _: object) -> TargetOutputs:
            final = ids[..., None].expand(-1, -1, 4).to(dtype)
            return TargetOutputs(ids, loss_mask, 2 * final, final, None)

        return FeatureCache(tmp_path / "features", run_target, torch.device("cpu"), 4, "", dtype)

    def windows_of(ids: torch.Tensor) -> Windows:
        return Windows(ids, torch.ones_like(ids, dtype=torch.bool), (3,) * len(ids))

    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    cache_of(torch.bfloat16).get(windows_of(ids[:1]))
    features = cache_of(torch.float32).get(windows_of(ids)).features
    assert features.dtype == torch.float32
    assert torch.allclose(features[..., 0], 2.0 * ids, rtol=0.02)


HELD_OUT = DraftConfig(data=("x",), held_out=1, held_out_tokens=9)
OTHER = replace(HELD_OUT, held_out=2)


@pytest.mark.parametrize("content", [b"", b'{"key": {', b"[]", b"\xff", b'{"key": null}'])
def test_damaged_held_out_texts_are_written_again(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "held_out.json"
    load_held_out_texts(None, None, [], HELD_OUT, file)  # type: ignore[arg-type]
    file.write_bytes(content)
    assert load_held_out_texts(None, None, [], OTHER, file) == []  # type: ignore[arg-type]
    assert json.loads(file.read_text())["texts"] == []


def test_held_out_texts_of_another_target_are_written_again(tmp_path: Path) -> None:
    """Another folder, or other weights in the same one."""
    file, folders = tmp_path / "held_out.json", [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        write_tiny_model(folder)

    def loaded(model: Path) -> int:
        config = replace(HELD_OUT, model=str(model))
        return len(load_held_out_texts(None, None, [], config, file))  # type: ignore[arg-type]

    for change in (lambda: folders[1], lambda: write_tiny_model(folders[0], seed=1)):
        loaded(folders[0])
        saved = json.loads(file.read_text())
        saved["texts"] = [{"source": "a", "prompt": 2, "token_ids": [1, 2, 3]}]
        file.write_text(json.dumps(saved))
        assert loaded(folders[0]) == 1 and loaded(change()) == 0
