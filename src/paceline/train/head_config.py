"""What determines the training of a head, for all kinds of heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadConfig:
    """A run. Sizes in tokens, rates per step."""

    target: str
    data: tuple[str, ...]  # FILE or FILE=WEIGHT
    valid: tuple[str, ...] = ()
    exclude_licenses: tuple[str, ...] = ("CC-BY-SA",)
    seq_len: int = 1024  # longest piece of a document
    long_every: int = 10  # every n-th batch joins documents to max_positions; 0 is never
    max_positions: int = 1024  # or as long as the target allows
    batch_tokens: int = 4096
    micro_tokens: int = 2048
    steps: int = 1000
    warmup: int = 50
    lr: float = 0.005
    adam_lr: float = 0.003
    weight_decay: float = 0.05
    argmax_weight: float = 0.3  # share of the loss against the target's likeliest token
    seed: int = 0
    draft_length: int = 4  # held-out acceptance is measured for drafts of this length
    held_out: int = 8  # openings of each validation file
    held_out_tokens: int = 96
    cache_features: bool = False  # keep what the target says about each piece on disk
    loss_on: str = "assistant"  # tokens to be learnt: an assistant's, or all
    dtype: str = "bfloat16"  # of target and head; the optimizer's own weights are float32
