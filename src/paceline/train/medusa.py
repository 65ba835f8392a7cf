"""Training Medusa heads (Cai et al. 2024, arXiv 2401.10774, section 3.2).

Head k, from the features at position t, learns the target's distribution of token t + 2 + k. The
target is frozen (Medusa-1), so its text does not change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, save_medusa
from paceline.errors import ConfigError
from paceline.train.acceptance import HeldOutText, candidate_ranks, start_positions
from paceline.train.configs import MedusaTrainConfig as MedusaTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.reading import TargetOutputs
from paceline.train.trainer import run_name
from paceline.train.unrolled import DraftStarts, loss_at_offset

_RANKS = 10  # number of candidates per head whose accuracy is measured


class MedusaTrainer(HeadTrainer):
    """Trains Medusa heads on a frozen target."""

    config: MedusaTrainConfig
    head: MedusaHeads
    spec = "medusa:"
    what = "Medusa heads"

    def check(self) -> None:
        self.adamw_names = (f".{self.config.medusa_layers}.weight",)  # the vocabulary layers
        if self.config.medusa_layers < 1 and self.config.shared_head:
            raise ConfigError(
                "--medusa-layers 0 with --shared-head leaves no weights to train; change either"
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.num_layers,)

    def head_config(self) -> MedusaConfig:
        config = self.config
        return MedusaConfig(
            hidden_size=self.shape.hidden_size,
            vocab_size=self.vocab_size,
            heads=config.medusa_heads,
            layers=config.medusa_layers,
            shared_head=config.shared_head,
            base_model=run_name(config.model),
        )

    def new_head(self) -> MedusaHeads:
        heads = MedusaHeads(self.head_shape)
        with torch.no_grad():  # the vocabulary layers start as copies of the target's lm_head
            for name, weight in heads.named_parameters():
                if name.endswith(self.adamw_names):
                    weight.copy_(self.lm_head.weight)
        return heads

    def step_losses(self, target_out: TargetOutputs) -> Iterator[torch.Tensor]:
        starts, loss_mask = DraftStarts.of(target_out.loss_mask), target_out.loss_mask.flatten()
        probs, row_of = self.target_probs(target_out)
        features = target_out.features.flatten(0, 1)[starts.flat]
        for k in range(self.config.medusa_heads):
            logits = self.head.logits(k, features, self.lm_head)
            yield loss_at_offset(starts, k, loss_mask, logits, probs, row_of)

    def levels(self, target_out: TargetOutputs, starts: DraftStarts) -> Iterator[torch.Tensor]:
        features = target_out.features.flatten(0, 1)[starts.flat]
        for k in range(self.config.medusa_heads):
            yield self.head.logits(k, features, self.lm_head).argmax(-1)

    @torch.no_grad()
    def write_result(self) -> None:
        """Write the heads with the accuracy of their candidates, which determines draft trees."""
        if self.valid_sources:
            ranks = torch.cat([self._ranks(text) for text in self.held_out_texts])
            self.head.config = replace(self.head.config, accuracy=accuracy_of(ranks, _RANKS))
        save_medusa(self.stored(), self.folder, self.num_layers)

    def _ranks(self, text: HeldOutText) -> torch.Tensor:
        """The rank of the text's token for each head (``candidate_ranks``): int64 [n, heads]."""
        target_out = self.outputs_for_text(text)
        rows = start_positions(target_out.ids[0], text.prompt)
        logits = self.head(target_out.features[0, rows], self.lm_head)  # [heads, n, vocab]
        best = logits.topk(_RANKS, -1).indices.transpose(0, 1)
        return candidate_ranks(best, target_out.ids[0], rows).cpu()


def accuracy_of(ranks: torch.Tensor, count: int) -> tuple[tuple[float, ...], ...]:
    """How often each of ``count`` candidates of each head was right, from ranks ``[n, heads]``,
    given that all previous heads had the right token among their candidates."""
    table = []
    reached = torch.ones(len(ranks), dtype=torch.bool)
    for rank in ranks.unbind(1):
        reached &= rank >= 0
        hits = torch.bincount(rank[reached], minlength=count + 1)[:count]
        table.append(tuple((hits / max(1, int(reached.sum()))).tolist()))
        reached &= rank < count
    return tuple(table)
