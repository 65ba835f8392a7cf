"""The EAGLE head: one decoder layer that continues the target's features (the papers: eagle.py;
names of parameters: eagle_format.py).

Row t takes the target's feature at position t and the embedding of token t + 1; its logits are for
token t + 2. When drafting, later rows take the head's own hidden output instead of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.draft.heads.network import AttendingHead, HeadConfig, HeadLayer
from paceline.errors import ConfigError
from paceline.model.backends.base import Attend


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """Shape of an EAGLE head; ``version`` 1 (also EAGLE-2) or 3. Heads of version 1 draft with the
    target's language-model head, and have its vocabulary and width."""

    version: int
    target_hidden_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual starts behind hidden_norm
    has_lm_head: bool = True

    def _problem(self) -> str | None:
        narrower = self.hidden_size != self.target_hidden_size
        if self.version not in (1, 3):
            return f"EAGLE version {self.version} is unknown; use 1 (also for 2) or 3"
        if self.version == 1 and (len(self.feature_layers) > 1 or narrower):
            return (
                "EAGLE-1 continues the feature of one target layer at the target's own width; "
                "use version 3 for several layers or another width"
            )
        if self.version == 1 and self.columns < self.vocab_size:
            return "EAGLE-1 drafts with the target's head: no draft vocabulary"
        if self.version == 3 and not self.has_lm_head and narrower:
            return "it has no lm_head, and the target's fits heads of its width"
        return super()._problem()


def default_feature_layers(version: int, target_layers: int) -> tuple[int, ...]:
    """The layers of the papers: an early, a middle and a late one (3), the final output (1)."""
    if version == 1:
        return (target_layers,)
    early, late = min(2, target_layers), max(0, target_layers - 3)
    return (early, target_layers // 2, late)


class EagleHead(AttendingHead):
    """Weights and forward of a head, for training and drafting. ``target_head`` maps ``[T,
    hidden]`` to logits ``[T, vocab]``, for version 1 and checkpoints without ``lm_head``."""

    target_head: Callable[[torch.Tensor], torch.Tensor] | None

    def __init__(
        self,
        config: EagleConfig,
        draft_ids: Sequence[int] | None = None,
        target_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(config)
        self.config = config
        # Not a submodule: the target's weights are not part of the head.
        self.__dict__["target_head"] = target_head
        size = config.hidden_size
        if config.version == 3:
            inputs = len(config.feature_layers) * config.target_hidden_size
            self.fc = nn.Linear(inputs, size, bias=config.fc_bias)
            self.midlayer = HeadLayer(config, ("input_layernorm", "hidden_norm"), 2 * size)
            self.norm = nn.RMSNorm(size, config.rms_norm_eps)
            if config.has_lm_head:
                self.lm_head = nn.Linear(size, config.columns, bias=False)
            self.register_vocabulary(config, draft_ids)
        else:
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
            self.layers = nn.ModuleList([HeadLayer(config, (), size)])

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features ``[T, layers * target_hidden]`` as hidden states ``[T, H]``."""
        if self.config.version == 1:
            return features
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        only: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings of the next tokens ``[T, H]`` and fused features or earlier outputs ``[T, H]``
        at ``positions [T]`` to hidden states ``[T, H]``; with ``only [N]`` those rows' ``[N, H]``.
        The output, before the final norm, is the next step's ``hidden``. Version 3 attends from
        ``[norm(embedding), norm(hidden)]``, version 1 from both fused, without a norm."""
        angles, layer = self.angles(positions, hidden), self._layer
        if self.config.version == 3:
            normed = layer.hidden_norm(hidden)
            x = torch.cat((layer.input_layernorm(embeds), normed), -1)
            residual = normed if self.config.norm_before_residual else hidden
        else:
            x = residual = self.fc(torch.cat((embeds, hidden), -1))
        return layer(x, residual, angles, attend, only=only)  # type: ignore[no-any-return]

    @property
    def _layer(self) -> Any:
        return self.midlayer if self.config.version == 3 else self.layers[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, draft_vocab]``: for the token after the embedded one."""
        if self.config.version == 3:
            hidden = self.norm(hidden)
            if self.config.has_lm_head:
                return self.lm_head(hidden)  # type: ignore[no-any-return]
        if self.target_head is None:
            raise ConfigError("this EAGLE head drafts with the target's head; give target_head")
        return self.target_head(hidden)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary ids, any shape, as ids of the target."""
        return ids + self.d2t[ids] if self.config.version == 3 else ids
