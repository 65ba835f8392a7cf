"""A small random model whose layers divide into groups, saved with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.lab.quantize import quantize
from paceline.model.loading import load_tokenizer
from paceline.model.quantised.convert import scheme_named


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = load_tokenizer("paceline/tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
