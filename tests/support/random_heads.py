"""Random EAGLE heads and block drafters: rarely right, which is all that parity needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.draft.heads.block_head import BlockConfig, BlockHead, save_block
from paceline.draft.heads.eagle_head import (
    EagleConfig,
    EagleHead,
    default_feature_layers,
    save_eagle,
)
from paceline.draft.trees.grow import scatter_to_vocabulary
from paceline.model.target import CausalModel
from support.engine_models import VOCAB


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


def write_block(root: Path, target: str, kind: str) -> str:
    """A folder with a random block drafter ("dflash" or "dspark") for the model in ``target``."""
    from transformers import AutoConfig

    wide = AutoConfig.from_pretrained(target)
    extended = kind == "dspark"
    config = BlockConfig(
        hidden_size=wide.hidden_size,
        heads=wide.num_attention_heads,
        kv_heads=wide.num_key_value_heads,
        head_dim=wide.hidden_size // wide.num_attention_heads,
        ffn_size=48,
        layers=2,
        vocab_size=wide.vocab_size,
        target_layers=wide.num_hidden_layers,
        feature_layers=(0, wide.num_hidden_layers),
        block_size=5,
        mask_token=0,
        max_positions=wide.max_position_embeddings,
        from_anchor=extended,
        markov_rank=8 if extended else 0,
        confidence=extended,
        confidence_with_markov=extended,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_block(BlockHead(config), root / kind)
    return str(root / kind)


def eagle_config(**changes: Any) -> EagleConfig:
    """Of a head of width 32 for a target of six layers; it drafts 5 of 40 tokens."""
    shape = {"version": 3, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
    target = {"vocab_size": 40, "target_hidden_size": 24, "target_layers": 6}
    own = {"ffn_size": 48, "draft_vocab_size": 5, "max_positions": 64}
    return EagleConfig(**{**shape, **target, **own, **changes})


def random_head(target: CausalModel, version: int, mask: int | None = None) -> EagleHead:
    """Float32; logits far from uniform, so that wrong rows show. ``mask``: P-EAGLE's token."""
    small = 40 if version == 3 else VOCAB
    config = eagle_config(
        version=version,
        vocab_size=VOCAB,
        target_hidden_size=32,
        target_layers=target.num_layers,
        feature_layers=(0, 1, 2) if version == 3 else (target.num_layers,),
        draft_vocab_size=small,
        max_positions=160,
        mask_token=mask,
        layers=1 if mask is None else 2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(version)
        ids = sorted(torch.randperm(VOCAB)[:small].tolist())
        head = EagleHead(config, ids if version == 3 else None, target.hf.get_output_embeddings())
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4.0)
    return head.eval()


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scaling: float
) -> torch.Tensor:
    """Causal attention over all rows: what ``EagleHead.forward`` takes for ``attend``."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def expanded(head: EagleHead, logits: torch.Tensor) -> torch.Tensor:
    """``[T, draft_vocab]`` over the target's vocabulary."""
    if head.config.draft_vocab_size == head.config.vocab_size:
        return logits
    return scatter_to_vocabulary(logits, head.draft_ids, head.config.vocab_size)
