"""Training block drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Blocks start at every ``stride``-th position. A block attends to the target's features of the text
before it and to itself. Each of its rows learns the target's distribution, later rows with less
weight. DSpark's bias reads the text's own tokens; its confidence head learns which share of the
draft distribution the target accepts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from paceline.draft.heads.block_head import BlockConfig, BlockHead, save_block, usual_layers
from paceline.train.configs import DFlashTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.losses import total_variation
from paceline.train.reading import TargetOutputs
from paceline.train.unrolled import DraftAttention, DraftStarts, loss_at_offset


class BlockTrainer(HeadTrainer):
    """Trains a block drafter on a frozen target."""

    config: DFlashTrainConfig
    head: BlockHead

    def check(self) -> None:
        self.spec = f"{self.config.kind}:"
        self.what = "A DSpark head" if self.config.kind == "dspark" else "A DFlash head"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers or usual_layers(self.num_layers, 3)

    def head_config(self) -> BlockConfig:
        config = self.config
        extended = config.kind == "dspark"
        return BlockConfig(
            **self.layer_config(config),
            block_size=config.block_size,
            mask_token=self.mask_token,
            from_anchor=extended,
            causal=config.causal,
            markov_rank=config.markov_rank if extended else 0,
            confidence=extended,
            confidence_with_markov=extended and config.markov_rank > 0,
        )

    def new_head(self) -> BlockHead:
        """A head that starts from the target's last layers and norm, as far as these have the same
        names and shapes, reads only the last of the features, and has no bias."""
        config: BlockConfig = self.head_shape
        head, size = BlockHead(config), config.hidden_size
        last, target = self.num_layers - config.layers, self.target.base_model.state_dict()
        with torch.no_grad():
            for name, weight in head.named_parameters():
                part, _, rest = name.partition(".")
                if part == "layers":
                    number, _, rest = rest.partition(".")
                    name = f"layers.{last + int(number)}.{rest}"
                value = target.get(name.replace("hidden_norm", f"layers.{last}.input_layernorm"))
                if value is not None and value.shape == weight.shape:
                    weight.copy_(value)
            head.fc.weight.normal_(std=0.02 * size**-0.5)
            head.fc.weight[:, -size:] += torch.eye(size)
            if head.markov_head is not None:
                head.markov_head.markov_w2.weight.zero_()
        return head

    def step_losses(self, target_out: TargetOutputs) -> Iterator[torch.Tensor]:
        config = self.config
        probs, row_of = self.target_probs(target_out)
        starts, _ = DraftStarts.of(target_out.loss_mask).strided(config.stride, self.step)
        outputs = self.outputs(target_out, starts)
        loss_mask, ids = target_out.loss_mask.flatten(), target_out.ids.flatten()
        for j, output in enumerate(outputs.unbind(1)):
            before = ids[starts.index_ahead(1 + j)]
            logits = self.logits(output, before)
            loss = loss_at_offset(starts, j, loss_mask, logits, probs, row_of, config.tv_weight)
            if config.kind == "dspark":
                counted = starts.in_window(2 + j) & loss_mask[starts.index_ahead(2 + j)]
                target = probs[row_of[starts.index_ahead(1 + j)]].float()
                rejection = total_variation(target, logits.detach().float().softmax(-1))
                confidence = self.head.confidence(output, before).float()
                of_confidence = F.binary_cross_entropy_with_logits(
                    confidence, 1 - rejection, reduction="none"
                )
                loss = loss + config.confidence_weight * (of_confidence * counted).mean()
            yield loss

    def outputs(self, target_out: TargetOutputs, starts: DraftStarts) -> torch.Tensor:
        """The outputs ``[N, drafts, d]`` of N blocks, anchored at the tokens after their starts."""
        head, config = self.head, self.head.config
        size, (windows, width) = config.block_size, target_out.ids.shape
        device = target_out.ids.device
        rows = torch.full((len(starts.flat), size), config.mask_token, device=device)
        rows[:, 0] = target_out.ids.flatten()[starts.index_ahead(1)]
        with torch.no_grad():
            embeds = self.target.get_input_embeddings()(rows.flatten())
        positions = torch.arange(width, device=device).repeat(windows)
        context = list(head.context(target_out.features.flatten(0, 1), positions))
        within = starts.position[:, None] + 1 + torch.arange(size, device=device)
        attend = DraftAttention(starts, None, context, size, config.causal)
        outputs: torch.Tensor = head(embeds, within.flatten(), attend)
        return outputs.view(len(rows), size, -1)[:, -config.drafts :]

    def logits(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The logits ``[N, vocab]`` of outputs ``[N, d]`` that follow the tokens ``before [N]``."""
        logits: torch.Tensor = self.lm_head(outputs)
        bias = self.head.bias(outputs, before)
        return logits if bias is None else logits + bias

    def levels(self, target_out: TargetOutputs, starts: DraftStarts) -> Iterator[torch.Tensor]:
        before = target_out.ids.flatten()[starts.index_ahead(1)]
        for output in self.outputs(target_out, starts).unbind(1):
            before = self.logits(output, before).argmax(-1)
            yield before

    def write_result(self) -> None:
        save_block(self.stored(), self.folder)
