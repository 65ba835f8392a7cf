"""Training EAGLE heads: EAGLE-3 with training-time test, and EAGLE-1.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the head is unrolled over several steps as in
drafting, so it learns to go on from its own hidden states; only the tokens' laws are learnt, no
features. EAGLE-1 (Li et al. 2024, arXiv 2401.15077): the head predicts the next feature
(smooth L1) and, through the target's own head, the next token's law.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.eagle_format import save_eagle
from paceline.draft.eagle_head import EagleConfig, EagleHead, default_feature_layers
from paceline.errors import ConfigError
from paceline.train.heads import HeadConfig, HeadTrainer
from paceline.train.observed import Observed


@dataclass(frozen=True)
class EagleTrainConfig(HeadConfig):
    """A run for an EAGLE head. Sizes of 0 are taken from the target."""

    version: int = 3
    ttt_steps: int = 4  # steps of the unrolled head (training-time test); 1 is none
    step_decay: float = 0.8  # weight of each further step
    feature_weight: float = 1.0  # EAGLE-1: weight of the feature loss
    token_weight: float = 0.1  # EAGLE-1: weight of the token loss
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 32000  # most frequent tokens of the data; 0 is all
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn_size: int = 0


class UnrolledAttention:
    """Attention of a head unrolled over a whole window at once.

    Row t of step j stands for the drafted token j of a draft that started at t. It attends to
    the keys of step 0 up to t (the committed tokens) and to row t of the steps 1 to j (the
    draft's own tokens), as it would with a cache.
    """

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """As ``paceline.model.lean.Attend``; T rows are the windows one after the other."""
        heads, rows, width = query.shape[1:]
        kv_heads, windows = key.shape[1], self.windows
        length = rows // windows
        # [1, heads, T, d] to [windows, heads, length, d]
        q, k, v = (
            each[0].reshape(-1, windows, length, width).transpose(0, 1)
            for each in (query, key, value)
        )
        self.steps.append((k, v))
        if len(self.steps) == 1:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
            )
        else:
            out = self._later(q.reshape(windows, kv_heads, -1, length, width) * scaling).flatten(
                1, 2
            )
        return out.transpose(1, 2).reshape(1, rows, heads, width)

    def _later(self, q: torch.Tensor) -> torch.Tensor:
        """Scaled ``[windows, kv_heads, group, length, d]`` over all steps so far."""
        (k0, v0), *later = self.steps
        length = q.shape[3]
        scores = (q @ k0[:, :, None].transpose(-1, -2)).float()
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        own = [(q * k[:, :, None]).float().sum(-1, keepdim=True) for k, _ in later]
        weights = torch.cat((scores, *own), -1).softmax(-1).to(q.dtype)
        out = weights[..., :length] @ v0[:, :, None]
        for index, (_, v) in enumerate(later, length):
            out = out + weights[..., index, None] * v[:, :, None]
        return out


class EagleTrainer(HeadTrainer):
    """Trains an EAGLE head on a frozen target."""

    config: EagleTrainConfig
    head: EagleHead

    @property
    def lookahead(self) -> int:
        return self.config.ttt_steps

    @property
    def feature_layers(self) -> tuple[int, ...]:
        config = self.config
        return config.feature_layers or default_feature_layers(config.version, self.num_layers)

    def check_shape(self) -> None:
        if self.config.ttt_steps < 1:
            raise ConfigError("--ttt-steps must be at least 1")
        super().check_shape()
        self.head_config()

    def head_config(self) -> EagleConfig:
        """The head's shape, where not given the target's. Raises ConfigError."""
        config, shape, vocab = self.config, self.shape, self.vocab_size
        count = vocab if config.version == 1 else min(config.draft_vocab_size or vocab, vocab)
        heads = config.heads or shape.num_attention_heads
        own_kv_heads = getattr(shape, "num_key_value_heads", None) or heads
        own_width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        rope = getattr(shape, "rope_parameters", None) or {}
        return EagleConfig(
            version=config.version,
            hidden_size=shape.hidden_size,
            heads=heads,
            kv_heads=config.kv_heads or (own_kv_heads if not config.heads else heads),
            head_dim=config.head_dim or own_width,
            ffn_size=config.ffn_size or getattr(shape, "intermediate_size", 4 * shape.hidden_size),
            vocab_size=vocab,
            target_hidden_size=shape.hidden_size,
            target_layers=self.num_layers,
            feature_layers=self.feature_layers,
            draft_vocab_size=count,
            max_positions=getattr(shape, "max_position_embeddings", config.max_positions),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rms_norm_eps=getattr(shape, "rms_norm_eps", 1e-6),
        )

    def new_head(self) -> EagleHead:
        shape, target_head = self.head_config(), self.target.get_output_embeddings()
        if shape.version == 1:
            return EagleHead(shape, target_head=target_head)
        ids = self.frequent_tokens(shape.draft_vocab_size)
        head = EagleHead(shape, ids)
        with torch.no_grad():  # a start that already knows the target's token directions
            head.lm_head.weight.copy_(target_head.weight[ids])
        return head

    def frequent_tokens(self, count: int) -> list[int]:
        """The ``count`` most frequent ids of the weighted training data, ascending."""
        vocab = self.vocab_size
        shares = np.zeros(vocab)
        for stream, weight in zip(self.mixture.streams, self.mixture.weights, strict=True):
            shares += weight * np.bincount(stream, minlength=vocab)[:vocab] / len(stream)
        best = np.argsort(-shares, kind="stable")[:count]
        return sorted(int(index) for index in best)

    # -- loss ----------------------------------------------------------------------------------

    def loss(self, seen: Observed) -> torch.Tensor:
        config, head = self.config, self.head
        windows, size = seen.ids.shape
        length = size - self.lookahead
        with torch.no_grad():
            laws, known = self._target_laws(seen.logits[:, 1:])
        attend = UnrolledAttention(windows)
        hidden = head.fuse(seen.features[:, :length].flatten(0, 1))
        positions = torch.arange(length, device=seen.ids.device).repeat(windows)
        result = hidden.new_zeros((), dtype=torch.float32)
        weights = [config.step_decay**j for j in range(config.ttt_steps)]
        for j, weight in enumerate(weights):
            embeds = seen.embeds[:, 1 + j : 1 + j + length].flatten(0, 1)
            hidden = head(embeds, hidden, positions + j, attend)
            law = laws[:, j : j + length].flatten(0, 1)
            logits = head.logits(hidden).float()
            # Cross-entropy against a law: log-sum-exp minus the expected logit.
            losses = logits.logsumexp(-1) - (logits * law).sum(-1)
            step = (losses * known[:, j : j + length].flatten()).mean()
            if config.version == 1:
                feature = seen.features[:, 1 + j : 1 + j + length].flatten(0, 1)
                distance = F.smooth_l1_loss(hidden.float(), feature.float())
                step = config.token_weight * step + config.feature_weight * distance
            result = result + weight / sum(weights) * step
        return result

    def _target_laws(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft should say at every position: laws ``[B, W, draft_vocab]`` and, as 0 or
        1 ``[B, W]``, whether the target's likeliest token is in the draft vocabulary at all."""
        best = logits.argmax(-1)
        known = torch.ones_like(best, dtype=torch.float32)
        head, share = self.head, self.config.argmax_weight
        restricted = head.config.draft_vocab_size < head.config.vocab_size
        if restricted:
            known = head.t2d[best].float()
            ids = head.to_target_ids(torch.arange(len(head.d2t), device=best.device))
            logits = logits[..., ids]
            best = logits.argmax(-1)
        laws = logits.float().softmax(-1) * (1 - share)
        if share:
            spike = torch.arange(laws.shape[-1], device=best.device) == best[..., None]
            laws = laws + share * spike
        return laws.to(logits.dtype), known

    # -- drafts --------------------------------------------------------------------------------

    def drafts(self, seen: Observed, length: int) -> torch.Tensor:
        head = self.head
        rows = seen.ids.shape[1]
        # Tokens beyond the end are drafted from nothing and never compared.
        embeds = F.pad(seen.embeds[0], (0, 0, 0, length))
        attend = UnrolledAttention(1)
        hidden = head.fuse(seen.features[0])
        positions = torch.arange(rows, device=seen.ids.device)
        found = []
        for j in range(length):
            hidden = head(embeds[1 + j : 1 + j + rows], hidden, positions + j, attend)
            found.append(head.to_target_ids(head.logits(hidden).argmax(-1)))
        return torch.stack(found, 1)

    def write_head(self, folder: Path) -> None:
        save_eagle(self.head, folder)
