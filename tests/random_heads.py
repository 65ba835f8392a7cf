"""Random EAGLE heads for a target folder: rarely right, which is all that parity needs."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.draft.eagle_format import save_eagle
from paceline.draft.eagle_head import EagleConfig, EagleHead, default_feature_layers


def write_eagle(root: Path, target: str, version: int) -> str:
    """A folder with a random head for the model in folder ``target``."""
    from transformers import AutoConfig

    wide = AutoConfig.from_pretrained(target)
    reduced = wide.vocab_size // 2 if version == 3 else wide.vocab_size
    config = EagleConfig(
        version=version,
        hidden_size=wide.hidden_size,
        heads=wide.num_attention_heads,
        kv_heads=wide.num_key_value_heads,
        head_dim=wide.hidden_size // wide.num_attention_heads,
        ffn_size=48,
        vocab_size=wide.vocab_size,
        target_hidden_size=wide.hidden_size,
        target_layers=wide.num_hidden_layers,
        feature_layers=default_feature_layers(version, wide.num_hidden_layers),
        draft_vocab_size=reduced,
        max_positions=wide.max_position_embeddings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(version)
        ids = sorted(torch.randperm(wide.vocab_size)[:reduced].tolist())
        head = EagleHead(config, ids if version == 3 else None)
    folder = root / f"eagle{version}"
    save_eagle(head, folder)
    return str(folder)
