"""Training Medusa heads (Cai et al. 2024, arXiv 2401.10774, section 3.2).

Head k learns the target's distribution two tokens and k further on. The target stays as it is
(Medusa-1), so its text does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.draft.heads.medusa_head import MedusaConfig, MedusaHeads, save_medusa
from paceline.errors import ConfigError
from paceline.train.acceptance import WrittenText, drafting_rows, ranks_of
from paceline.train.configs import MedusaTrainConfig as MedusaTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.losses import falling
from paceline.train.reading import Observed
from paceline.train.trainer import run_name
from paceline.train.unrolled import DraftStarts, loss_ahead

_RANKS = 10  # candidates of each head whose accuracy is measured


class MedusaTrainer(HeadTrainer):
    """Trains Medusa heads on a frozen target."""

    config: MedusaTrainConfig
    head: MedusaHeads
    spec = "medusa:"
    what = "Medusa heads"

    def check(self) -> None:
        if self.config.medusa_layers < 1 and self.config.shared_head:
            raise ConfigError("heads without a block that share the target's head have no weights")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.num_layers,)

    @property
    def lm_head(self) -> nn.Linear:
        module: nn.Linear = self.target.get_output_embeddings()
        return module

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
        with torch.no_grad():  # the heads begin as copies of the target's own
            for layer in heads.vocabulary_layers():
                layer.weight.copy_(self.lm_head.weight)
        return heads

    @property
    def outer(self) -> tuple[str, ...]:
        return (f".{self.config.medusa_layers}.weight",)  # a head's vocabulary layer

    # -- loss ----------------------------------------------------------------------------------

    def loss_of(self, seen: Observed) -> torch.Tensor:
        config = self.config
        starts, learn = DraftStarts.of(seen.learn), seen.learn.flatten()
        probs, row_of = self.target_probs(seen)
        features = seen.features.flatten(0, 1)[starts.flat]
        result = features.new_zeros((), dtype=torch.float32)
        for k, weight in enumerate(falling(config.step_decay, config.medusa_heads)):
            logits = self.head.logits(k, features, self.lm_head)
            result = result + weight * loss_ahead(starts, k, learn, logits, probs, row_of)
        return result

    # -- drafting ------------------------------------------------------------------------------

    def levels(self, seen: Observed, starts: DraftStarts, length: int) -> Iterator[torch.Tensor]:
        features = seen.features.flatten(0, 1)[starts.flat]
        for k in range(min(length, self.config.medusa_heads)):
            yield self.head.logits(k, features, self.lm_head).argmax(-1)

    @torch.no_grad()
    def write_head(self, folder: Path) -> None:
        """With how often each candidate of each head was right, by which trees are shaped."""
        if self.valid_sources:
            ranks = torch.cat([self._ranks(text) for text in self.held_out_texts])
            self.head.config = replace(self.head.config, accuracy=accuracy_of(ranks, _RANKS))
        save_medusa(self.head, folder, self.num_layers)

    def _ranks(self, text: WrittenText) -> torch.Tensor:
        """int64 [n, heads]: at which rank each head had the token of the text (``ranks_of``)."""
        seen = self.seen_of(text)
        rows = drafting_rows(seen.ids[0], text.prompt)
        logits = self.head(seen.features[0, rows], self.lm_head)  # [heads, n, vocab]
        best = logits.topk(_RANKS, -1).indices.transpose(0, 1)
        return ranks_of(best, seen.ids[0], rows).cpu()


def accuracy_of(ranks: torch.Tensor, count: int) -> tuple[tuple[float, ...], ...]:
    """How often each of ``count`` candidates of each head was right, from ranks ``[n, heads]``.

    Given that the heads before had the token among theirs: only then does a node get its chance.
    """
    table = []
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for rank in ranks.unbind(1):
        alive &= rank >= 0
        hits = torch.bincount(rank[alive], minlength=count + 1)[:count]
        table.append(tuple((hits / max(1, int(alive.sum()))).tolist()))
        alive &= rank < count
    return tuple(table)
