"""What all tests share: no network, and a pair of tiny random models on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

# Before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

SENTENCES = [
    "Once upon a time there was a little girl named Lily. She loved to play in the garden.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
    "What is 12 + 30? The answer is 42, because 12 and 30 make 42.",
    "A small model guesses the words, and the large model checks all the guesses at once.",
]


def write_tiny_model(
    folder: Path, *, sentences: list[str] = SENTENCES, layers: int = 2, seed: int = 0
) -> Path:
    """A random Llama of width 32 with a tokenizer and chat template; context 256 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline.train.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(sentences, 320)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class TinyPair:
    """Folders of a random target, a draft with its vocabulary, and a draft with another one."""

    target: str
    draft: str
    foreign: str


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    root = tmp_path_factory.mktemp("models")
    others = ["Ein kleines Modell rät die Wörter.", "Das große prüft sie alle auf einmal." * 3]
    return TinyPair(
        target=str(write_tiny_model(root / "target", layers=3, seed=1)),
        draft=str(write_tiny_model(root / "draft", layers=1, seed=2)),
        foreign=str(write_tiny_model(root / "foreign", sentences=others, layers=1, seed=3)),
    )
