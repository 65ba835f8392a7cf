"""A small random model whose layers divide into groups, saved with a tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.lab.quantize import quantize
from paceline.model.loading import load_tokenizer
from paceline.model.quantised.convert import scheme_named


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random model of a config class, and what differs from these sizes."""
    tokenizer = load_tokenizer("paceline/tiny")
    common: dict[str, Any] = {
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 1024, "initializer_range": 0.1},
        "eos_token_id": tokenizer.eos_token_id,
    }

    def saved(config: Callable[..., Any], **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config(**common | changes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return saved


@pytest.fixture(scope="session")
def plain_folder(save: Callable[..., Path]) -> Path:
    return save(LlamaConfig, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def written(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model as ``paceline quantize`` writes it, by precision; nobody writes into it."""
    root = tmp_path_factory.mktemp("written")
    for precision in ("int8", "int4", "w4a16"):
        quantize(str(plain_folder), root / precision, scheme_named(precision))
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def four(written: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the one in 4 bits, to change."""
    return shutil.copytree(written["int4"], tmp_path / "four")
