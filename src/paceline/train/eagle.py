"""Training EAGLE heads.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the head is unrolled over several drafting steps, each
of which reads its own hidden states of the step before. It learns token distributions, not
features. EAGLE-1 (Li et al. 2024, arXiv 2401.15077): the head predicts the next feature (smooth L1
loss) and, through the target's lm_head, the next token's distribution. P-EAGLE (arXiv 2602.01469):
an EAGLE-3 head whose later steps read a mask token and a learnt feature, so that they can run in
one pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

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
from paceline.settings import flag
from paceline.train.configs import EagleTrainConfig as EagleTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.reading import TargetOutputs
from paceline.train.unrolled import DraftAttention, DraftStarts, loss_at_offset

_FROM_TARGET = "target"  # a value of --init
_SMALL = 0.1  # factor for weights that should have little effect at first


class EagleTrainer(HeadTrainer):
    """Trains an EAGLE head on a frozen target."""

    config: EagleTrainConfig
    head: EagleHead

    def check(self) -> None:
        is_eagle3 = self.config.version == 3
        self.spec = "eagle3:" if is_eagle3 else "eagle2:"
        self.what = "An EAGLE-3 head" if is_eagle3 else "An EAGLE head"
        if not is_eagle3 and self.config.init == _FROM_TARGET:
            raise ConfigError("--init target is for EAGLE-3 heads; leave it out")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        config = self.config
        return config.feature_layers or default_feature_layers(config.version, self.num_layers)

    def head_config(self) -> EagleConfig:
        config, vocab = self.config, self.vocab_size
        count = vocab if config.version == 1 else min(config.draft_vocab_size or vocab, vocab)
        return EagleConfig(
            **self.layer_config(config),
            version=config.version,
            target_hidden_size=self.shape.hidden_size,
            draft_vocab_size=count,
            mask_token=self.mask_token if config.parallel else None,
            has_embedding=config.own_embedding,
        )

    def new_head(self) -> EagleHead:
        shape: EagleConfig = self.head_shape
        target_head = self.lm_head
        if self.config.init not in ("", _FROM_TARGET):
            target = TargetShape(self.shape.hidden_size, self.vocab_size, self.num_layers)
            head = load_eagle(self.config.init, target, shape.version, target_head=target_head)
            sizes = ("heads", "kv_heads", "head_dim", "ffn_size")  # 0: not given
            given = [name for name in sizes if getattr(self.config, name)]
            for name in ("layers", "feature_layers", *given):
                theirs, ours = getattr(head.config, name), getattr(shape, name)
                if theirs != ours:
                    raise ConfigError(
                        f"{self.config.init} has {name} {theirs}, but this run {ours}; give the "
                        f"same {flag(name)}"
                    )
            mask = head.config.mask_token
            extended = replace(
                head.config,
                mask_token=shape.mask_token if mask is None else mask,
                has_embedding=head.config.has_embedding or shape.has_embedding,
            )
            if extended != head.config:
                weights, known = head.state_dict(), head.draft_ids
                head = self._with_embedding(EagleHead(extended, known, target_head))
                head.load_state_dict(weights, strict=False)
            return head.float()
        if shape.version == 1:
            return EagleHead(shape, target_head=target_head)
        ids = self.frequent_tokens(shape.columns)
        head = self._with_embedding(EagleHead(shape, ids))
        with torch.no_grad():  # start with the rows of the target's lm_head
            head.lm_head.weight.copy_(target_head.weight[ids])
            if self.config.init == _FROM_TARGET:
                self._start_from_target(head)
        return head

    def _with_embedding(self, head: EagleHead) -> EagleHead:
        """The head; an embedding of its own starts as the target's."""
        if head.embed_tokens is not None:
            tokens = torch.arange(self.vocab_size, device=self.device)
            with torch.no_grad():
                head.embed_tokens.weight.copy_(self.target.get_input_embeddings()(tokens))
        return head

    def _start_from_target(self, head: EagleHead) -> None:
        """Copy the target's last layers. The first one's input is close to the last feature;
        weights that read the embedding and other features start small. Raises ConfigError if the
        shapes differ."""
        base, width = self.target.base_model, head.config.hidden_size
        first, layers = head.midlayer, head.decoder
        try:
            for copied, layer in zip(base.layers[-len(layers) :], layers, strict=True):
                initial = dict(copied.named_parameters())
                if layer is first:
                    initial["hidden_norm.weight"] = initial["input_layernorm.weight"]
                    initial["input_layernorm.weight"] = base.layers[0].input_layernorm.weight
                for name, weight in layer.named_parameters():
                    columns = initial[name].shape[-1]
                    weight[..., -columns:].copy_(initial[name])
                    weight[..., :-columns].mul_(_SMALL)
            head.norm.weight.copy_(base.norm.weight)
        except (AttributeError, KeyError, RuntimeError, ValueError):
            raise ConfigError(
                "the head cannot start from the target's last layers, whose weights have other "
                "names or shapes; leave --init target out"
            ) from None
        head.fc.weight.mul_(_SMALL)[:, -width:].add_(torch.eye(width))

    def frequent_tokens(self, size: int) -> list[int]:
        """The ``size`` most frequent token ids in the loss mask, weighted by the shares of the
        files, in ascending order. Other tokens count a thousandth as much."""
        vocab = self.vocab_size
        shares = np.zeros(vocab)
        for stream, weight in zip(self.documents.streams, self.documents.weights, strict=True):
            for part, importance in ((stream.ids[stream.loss_mask], 1.0), (stream.ids, 1e-3)):
                counts = np.bincount(part, minlength=vocab)[:vocab]
                shares += importance * weight * counts / max(1, len(part))
        best = np.argsort(-shares, kind="stable")[:size]
        return sorted(int(index) for index in best)

    def step_losses(self, target_out: TargetOutputs) -> Iterator[torch.Tensor]:
        config, head = self.config, self.head
        loss_mask, ids = target_out.loss_mask, None
        if head.config.reduced:  # tokens outside the draft vocabulary are never drafted
            loss_mask = loss_mask & head.t2d[target_out.ids]
            ids = head.to_target_ids(torch.arange(len(head.d2t), device=target_out.ids.device))
        probs, row_of = self.target_probs(target_out, ids)
        features, starts = target_out.features.flatten(0, 1), DraftStarts.of(target_out.loss_mask)
        steps = islice(self.unrolled(target_out, starts, config.stride), config.ttt_steps)
        for j, (starts, hidden) in enumerate(steps):
            logits = head.logits(hidden)
            loss = loss_at_offset(starts, j, loss_mask.flatten(), logits, probs, row_of)
            if config.version == 1:
                feature = features[starts.index_ahead(1 + j)].float()
                distance = F.smooth_l1_loss(hidden.float(), feature, reduction="none").mean(-1)
                feature_loss = (distance * starts.in_window(1 + j)).mean()
                loss = config.token_weight * loss + config.feature_weight * feature_loss
            yield loss

    def unrolled(
        self, target_out: TargetOutputs, starts: DraftStarts, stride: int = 1
    ) -> Iterator[tuple[DraftStarts, torch.Tensor]]:
        """Unroll drafting steps without end; yields for each its N drafts and the head's hidden
        states ``[N, d]``. The steps read the text's own tokens instead of draft tokens (teacher
        forcing) or, for P-EAGLE, mask tokens. All positions take the first step, but only every
        ``stride``-th position takes the others."""
        head, (windows, width) = self.head, target_out.ids.shape
        then, kept = starts.strided(stride, self.step) if stride > 1 else (starts, slice(None))
        attend = DraftAttention(starts, then)
        embed = head.embed_tokens or self.target.get_input_embeddings()
        embeds = F.pad(embed(target_out.ids[:, 1:]), (0, 0, 0, 1)).flatten(0, 1)  # the next tokens'
        positions = torch.arange(width, device=target_out.ids.device).repeat(windows)
        fused = head.fuse(target_out.features.flatten(0, 1))
        hidden = head(embeds, fused, positions, attend, starts.flat)
        yield starts, hidden
        hidden, mask = hidden[kept], head.config.mask_token
        for j in count(1):
            words = embeds[then.index_ahead(j)]
            if mask is not None:  # since no row attends to a later one, this equals a single pass
                words = embed(torch.full_like(then.flat, mask))
                hidden = head.fuse(head.mask_hidden).expand(len(words), -1)
            hidden = head(words, hidden, then.position + j, attend)
            yield then, hidden

    def levels(self, target_out: TargetOutputs, starts: DraftStarts) -> Iterator[torch.Tensor]:
        for _, hidden in self.unrolled(target_out, starts):
            yield self.head.to_target_ids(self.head.logits(hidden).argmax(-1))

    def write_result(self) -> None:
        save_eagle(self.stored(), self.folder)
