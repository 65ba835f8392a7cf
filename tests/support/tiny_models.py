"""Tiny random models on disk, for tests of what needs real folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SENTENCES = [
    "Once upon a time there was a little girl named Lily. She loved to play in the garden.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
    "What is 12 + 30? The answer is 42, because 12 and 30 make 42.",
    "A small model guesses the words, and the large model checks all the guesses at once.",
]


# Of a Llama with grouped queries.
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_tiny_model(
    folder: Path, *, sentences: list[str] = SENTENCES, layers: int = 2, seed: int = 0
) -> Path:
    """A random Llama of width 32 with a tokenizer and chat template; context 256 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from embedded_target import train_tokenizer

    tokenizer = train_tokenizer(sentences, 320)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        **SMALL | heads | {"intermediate_size": 64, "num_hidden_layers": layers},
        vocab_size=len(tokenizer),
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
