"""Folders of random models that are not Llamas."""

from __future__ import annotations

from pathlib import Path


def write_gpt2(folder: Path) -> str:
    """Two layers of width 32, of which transformers does not know how to share them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    return str(folder)
