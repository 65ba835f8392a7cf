"""Training EAGLE heads: EAGLE-3 with training-time test, and EAGLE-1.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the head is unrolled over several steps as in
drafting, so it learns to go on from its own hidden states; only the tokens' distributions are
learnt, no features. EAGLE-1 (Li et al. 2024, arXiv 2401.15077): the head predicts the next feature
(smooth L1) and, through the target's own head, the next token's distribution.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.heads.eagle_format import load_eagle, save_eagle
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from paceline.draft.spec import TargetShape
from paceline.errors import ConfigError
from paceline.train.acceptance import AcceptanceCounts, WrittenText, match_matrix, walk
from paceline.train.configs import EagleTrainConfig as EagleTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.losses import falling
from paceline.train.reading import Observed
from paceline.train.unrolled import DraftStarts, UnrolledAttention, loss_ahead


class EagleTrainer(HeadTrainer):
    """Trains an EAGLE head on a frozen target."""

    config: EagleTrainConfig
    head: EagleHead

    def check(self) -> None:
        third = self.config.version == 3
        self.spec = "eagle3:" if third else "eagle2:"
        self.what = "An EAGLE-3 head" if third else "An EAGLE head"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        config = self.config
        return config.feature_layers or default_feature_layers(config.version, self.num_layers)

    def check_shape(self) -> None:
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
        if self.config.init:
            width, vocab = self.shape.hidden_size, self.vocab_size
            known = TargetShape(width, vocab, self.num_layers)
            head = load_eagle(self.config.init, known, self.config.version, target_head=target_head)
            if head.config.feature_layers != self.feature_layers:
                raise ConfigError(
                    f"{self.config.init} reads the layers {head.config.feature_layers} of its "
                    f"target, this run {self.feature_layers}; give the same --feature-layers"
                )
            return head.float()
        if shape.version == 1:
            return EagleHead(shape, target_head=target_head)
        ids = self.frequent_tokens(shape.draft_vocab_size)
        head = EagleHead(shape, ids)
        with torch.no_grad():  # a start that already knows the target's token directions
            head.lm_head.weight.copy_(target_head.weight[ids])
        return head

    def frequent_tokens(self, count: int) -> list[int]:
        """The ``count`` most frequent ids of what is to be learnt, by the files' shares,
        ascending. What stands around it, a thousandth as important, fills the rest."""
        vocab = self.vocab_size
        shares = np.zeros(vocab)
        for stream, weight in zip(self.documents.streams, self.documents.weights, strict=True):
            for part, importance in ((stream.ids[stream.learn], 1.0), (stream.ids, 1e-3)):
                counts = np.bincount(part, minlength=vocab)[:vocab]
                shares += importance * weight * counts / max(1, len(part))
        best = np.argsort(-shares, kind="stable")[:count]
        return sorted(int(index) for index in best)

    # -- loss ----------------------------------------------------------------------------------

    def loss(self, seen: Observed) -> torch.Tensor:
        config, head = self.config, self.head
        windows, width = seen.ids.shape
        places = DraftStarts.of(seen.learn)
        with torch.no_grad():
            probs, row_of = self._probs(seen)
        stride = config.ttt_stride
        then, kept = places.every(stride, self.step) if stride > 1 else (places, None)
        attend = UnrolledAttention(places, then)
        learn, features = self._learnable(seen), seen.features.flatten(0, 1)
        embeds = F.pad(seen.embeds[:, 1:], (0, 0, 0, 1)).flatten(0, 1)  # of the next tokens
        positions = torch.arange(width, device=seen.ids.device).repeat(windows)
        hidden = head(embeds, head.fuse(features), positions, attend, places.flat)
        result: torch.Tensor = hidden.new_zeros((), dtype=torch.float32)
        for j, weight in enumerate(falling(config.step_decay, config.ttt_steps)):
            if j == 1:
                places, hidden = then, hidden if kept is None else hidden[kept]
            if j:
                hidden = head(embeds[places.ahead(j)], hidden, places.position + j, attend)
            step = loss_ahead(places, j, learn, head.logits(hidden), probs, row_of)
            if config.version == 1:
                feature = features[places.ahead(1 + j)].float()
                distance = F.smooth_l1_loss(hidden.float(), feature, reduction="none").mean(-1)
                step = config.token_weight * step + config.feature_weight * (
                    (distance * places.inside(1 + j)).mean()
                )
            result = result + weight * step
        return result

    def _learnable(self, seen: Observed) -> torch.Tensor:
        """bool ``[B * W]``: tokens to be learnt that the head can draft at all."""
        learn: torch.Tensor = seen.learn
        if self.head.config.draft_vocab_size < self.head.config.vocab_size:
            learn = learn & self.head.t2d[seen.ids]
        return learn.flatten()

    def _probs(self, seen: Observed) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft should say: distributions ``[M, draft_vocab]`` of the M places whose next
        token is to be learnt, and int64 ``[B * W]``, which of them a place has (0 where none)."""
        head, ids = self.head, None
        if head.config.draft_vocab_size < head.config.vocab_size:
            ids = head.to_target_ids(torch.arange(len(head.d2t), device=seen.ids.device))
        return self.target_probs(seen, ids)

    # -- drafts --------------------------------------------------------------------------------

    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        seen = self.seen_of(text)
        drafts = self.drafts(seen, self.config.draft_length)
        return walk(match_matrix(drafts, seen.ids[0], text.prompt))

    def drafts(self, seen: Observed, length: int) -> torch.Tensor:
        """For one text (B = 1): int64 ``[W, length]``, target ids of greedy drafts.

        Row t drafts from the features up to t and the text's token t + 1; column j is about
        token t + 2 + j, the text's own tokens standing in for the draft's earlier ones.
        """
        head, rows = self.head, seen.ids.shape[1]
        places = DraftStarts.of(torch.ones_like(seen.learn))
        attend = UnrolledAttention(places)
        embeds = F.pad(seen.embeds[0, 1:], (0, 0, 0, 1))
        positions = torch.arange(rows, device=seen.ids.device)
        hidden = head(embeds, head.fuse(seen.features[0]), positions, attend, places.flat)
        levels = []
        for j in range(length):
            if j:  # what a draft says beyond the text's end is never compared
                hidden = head(embeds[places.ahead(j)], hidden, places.position + j, attend)
            levels.append(head.to_target_ids(head.logits(hidden).argmax(-1)))
        drafted = torch.full((rows, length), -1, dtype=torch.long, device=seen.ids.device)
        drafted[places.flat] = torch.stack(levels, 1)
        return drafted

    def write_head(self, folder: Path) -> None:
        save_eagle(self.head, folder)
