"""Training EAGLE heads.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the head is unrolled over several steps and goes on from
its own hidden states; it learns the tokens' distributions, no features. EAGLE-1 (Li et al. 2024,
arXiv 2401.15077): it predicts the next feature (smooth L1) and, through the target's head, the next
token's distribution. P-EAGLE (arXiv 2602.01469): an EAGLE-3 head whose further steps read one token
and one learnt feature, and so can be one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.draft.heads.eagle_head import (
    EagleConfig,
    EagleHead,
    default_feature_layers,
    load_eagle,
    save_eagle,
)
from paceline.draft.spec import TargetShape
from paceline.errors import ConfigError
from paceline.train.configs import EagleTrainConfig as EagleTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.losses import falling
from paceline.train.reading import Observed
from paceline.train.unrolled import DraftAttention, DraftStarts, loss_ahead

_FROM_TARGET = "target"  # --init
_SMALL = 0.1


class EagleTrainer(HeadTrainer):
    """Trains an EAGLE head on a frozen target."""

    config: EagleTrainConfig
    head: EagleHead

    def check(self) -> None:
        third = self.config.version == 3
        self.spec = "eagle3:" if third else "eagle2:"
        self.what = "An EAGLE-3 head" if third else "An EAGLE head"
        if not third and self.config.init == _FROM_TARGET:
            raise ConfigError("--init target is for EAGLE-3 heads; leave it out")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        config = self.config
        return config.feature_layers or default_feature_layers(config.version, self.num_layers)

    def head_config(self) -> EagleConfig:
        config, vocab = self.config, self.vocab_size
        count = vocab if config.version == 1 else min(config.draft_vocab_size or vocab, vocab)
        sizes = self.layer_config(config.ffn_size, config.heads)
        for name in ("kv_heads", "head_dim"):
            sizes[name] = getattr(config, name) or sizes[name]
        sizes["target_hidden_size"] = self.shape.hidden_size
        mask = self.mask_token if config.parallel else None
        return EagleConfig(version=config.version, draft_vocab_size=count, mask_token=mask, **sizes)

    def new_head(self) -> EagleHead:
        shape: EagleConfig = self.head_shape
        target_head = self.target.get_output_embeddings()
        if self.config.init not in ("", _FROM_TARGET):
            width, vocab = self.shape.hidden_size, self.vocab_size
            known = TargetShape(width, vocab, self.num_layers)
            head = load_eagle(self.config.init, known, self.config.version, target_head=target_head)
            if head.config.feature_layers != self.feature_layers:
                raise ConfigError(
                    f"{self.config.init} reads the layers {head.config.feature_layers} of its "
                    f"target, this run {self.feature_layers}; give the same --feature-layers"
                )
            if head.config.layers > 1:
                raise ConfigError(
                    f"{self.config.init} has {head.config.layers} layers; heads of one are trained "
                    "here: leave --init out"
                )
            if shape.mask_token is not None and head.config.mask_token is None:
                parallel = replace(head.config, mask_token=shape.mask_token)
                head, weights = EagleHead(parallel, head.draft_ids), head.state_dict()
                head.load_state_dict(weights, strict=False)
            return head.float()
        if shape.version == 1:
            return EagleHead(shape, target_head=target_head)
        ids = self.frequent_tokens(shape.columns)
        head = EagleHead(shape, ids)
        with torch.no_grad():  # a start that already knows the target's token directions
            head.lm_head.weight.copy_(target_head.weight[ids])
            if self.config.init == _FROM_TARGET:
                self._start_from_target(head)
        return head

    def _start_from_target(self, head: EagleHead) -> None:
        """Copy the target's last layer, whose input is near the last feature; what reads the
        embedding and the other features starts small. Raises ConfigError for other shapes."""
        base, width = self.target.base_model, head.config.hidden_size
        try:
            known = dict(base.layers[-1].named_parameters())
            known["hidden_norm.weight"] = known["input_layernorm.weight"]
            known["input_layernorm.weight"] = base.layers[0].input_layernorm.weight
            for name, weight in head.midlayer.named_parameters():
                weight[..., -known[name].shape[-1] :].copy_(known[name])
                weight[..., : -known[name].shape[-1]].mul_(_SMALL)
            head.norm.weight.copy_(base.norm.weight)
        except (AttributeError, KeyError, RuntimeError):
            raise ConfigError(
                "the head cannot start as the target's last layer, which has other sizes or names; "
                "leave --init target out"
            ) from None
        head.fc.weight.mul_(_SMALL)[:, -width:].add_(torch.eye(width))

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

    def loss_of(self, seen: Observed) -> torch.Tensor:
        config, head = self.config, self.head
        learn, ids = seen.learn, None
        if head.config.reduced:  # others are never drafted
            learn = learn & head.t2d[seen.ids]
            ids = head.to_target_ids(torch.arange(len(head.d2t), device=seen.ids.device))
        probs, row_of = self.target_probs(seen, ids)
        features = seen.features.flatten(0, 1)
        result = torch.zeros((), device=features.device)
        steps = self.unrolled(seen, DraftStarts.of(seen.learn), config.ttt_steps, config.stride)
        weights = falling(config.step_decay, config.ttt_steps)
        for j, ((starts, hidden), weight) in enumerate(zip(steps, weights, strict=True)):
            logits = head.logits(hidden)
            step = loss_ahead(starts, j, learn.flatten(), logits, probs, row_of)
            if config.version == 1:
                feature = features[starts.ahead(1 + j)].float()
                distance = F.smooth_l1_loss(hidden.float(), feature, reduction="none").mean(-1)
                step = config.token_weight * step + config.feature_weight * (
                    (distance * starts.inside(1 + j)).mean()
                )
            result = result + weight * step
        return result

    def unrolled(
        self, seen: Observed, starts: DraftStarts, steps: int, stride: int = 1
    ) -> Iterator[tuple[DraftStarts, torch.Tensor]]:
        """Of each drafting step the N drafts that take it, and the head's hidden states ``[N, d]``.

        The text's own tokens stand in for drafted ones, or P-EAGLE's rows. With a ``stride`` all
        take the first step; only every ``stride``-th position takes the others.
        """
        head, (windows, width) = self.head, seen.ids.shape
        then, kept = starts.every(stride, self.step) if stride > 1 else (starts, slice(None))
        attend = DraftAttention(starts, then)
        with torch.no_grad():
            embeds = self.target.get_input_embeddings()(seen.ids)
        embeds = F.pad(embeds[:, 1:], (0, 0, 0, 1)).flatten(0, 1)  # of the next tokens
        positions = torch.arange(width, device=seen.ids.device).repeat(windows)
        fused = head.fuse(seen.features.flatten(0, 1))
        hidden = head(embeds, fused, positions, attend, starts.flat)
        yield starts, hidden
        hidden, mask = hidden[kept], head.config.mask_token
        for j in range(1, steps):
            words = embeds[then.ahead(j)]
            if mask is not None:  # rows that see no later ones: as all of them in one pass
                with torch.no_grad():
                    words = self.target.get_input_embeddings()(torch.full_like(then.flat, mask))
                hidden = head.fuse(head.mask_hidden).expand(len(words), -1)
            hidden = head(words, hidden, then.position + j, attend)
            yield then, hidden

    def levels(self, seen: Observed, starts: DraftStarts, length: int) -> Iterator[torch.Tensor]:
        for _, hidden in self.unrolled(seen, starts, length):
            yield self.head.to_target_ids(self.head.logits(hidden).argmax(-1))

    def write_head(self, folder: Path) -> None:
        save_eagle(self.head, folder)
