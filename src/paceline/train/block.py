"""Training block drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Blocks start at every ``stride``-th position. A block sees the target's features of the text before
it and itself, and each of its rows learns the target's distribution, those further on with less
weight. DSpark's bias sees the text's own tokens; its confidence head learns how much of the drafted
distribution the target accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline.draft.heads.block_head import BlockConfig, BlockHead, save_block, usual_layers
from paceline.train.configs import DFlashTrainConfig
from paceline.train.heads import HeadTrainer
from paceline.train.losses import falling, total_variation
from paceline.train.reading import Observed
from paceline.train.unrolled import DraftAttention, DraftStarts, loss_ahead


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
            **self.layer_config(config.ffn_size),
            layers=config.layers,
            block_size=config.block_size,
            mask_token=self.mask_token,
            from_anchor=extended,
            causal=config.causal,
            markov_rank=config.markov_rank if extended else 0,
            confidence=extended,
            confidence_with_markov=extended and config.markov_rank > 0,
        )

    def new_head(self) -> BlockHead:
        """It begins with the target's last layers and norm, as far as they have the same weights,
        with the last of the features, and without a bias."""
        config: BlockConfig = self.head_shape
        head = BlockHead(config)
        size, last = config.hidden_size, self.num_layers - config.layers
        known = {
            name.removeprefix("model."): value for name, value in self.target.state_dict().items()
        }
        theirs = {"norm.weight": known.get("norm.weight")}
        theirs["hidden_norm.weight"] = known.get(f"layers.{last}.input_layernorm.weight")
        for number in range(config.layers):
            start = f"layers.{last + number}."
            parts = {name.removeprefix(start): v for name, v in known.items() if start in name}
            theirs |= {f"layers.{number}.{name}": value for name, value in parts.items()}
        with torch.no_grad():
            for name, weight in head.named_parameters():
                value = theirs.get(name)
                if value is not None and value.shape == weight.shape:
                    weight.copy_(value)
            head.fc.weight.normal_(std=0.02 * size**-0.5)
            head.fc.weight[:, -size:] += torch.eye(size)
            if head.markov_head is not None:
                head.markov_head.markov_w2.weight.zero_()
        return head

    # -- loss ----------------------------------------------------------------------------------

    def loss_of(self, seen: Observed) -> torch.Tensor:
        config, drafts = self.config, self.head.config.drafts
        probs, row_of = self.target_probs(seen)
        starts, _ = DraftStarts.of(seen.learn).every(config.stride, self.step)
        outputs = self.outputs(seen, starts)
        learn, ids = seen.learn.flatten(), seen.ids.flatten()
        result = torch.zeros((), device=outputs.device)
        for j, weight in enumerate(falling(config.step_decay, drafts)):
            before = ids[starts.ahead(1 + j)]
            logits = self.logits(outputs[:, j], before)
            step = loss_ahead(starts, j, learn, logits, probs, row_of, config.tv_weight)
            if config.kind == "dspark":
                wanted = starts.inside(2 + j) & learn[starts.ahead(2 + j)]
                target = probs[row_of[starts.ahead(1 + j)]].float()
                lost = total_variation(target, logits.detach().float().softmax(-1))
                chance = self.head.confidence(outputs[:, j], before).float()
                unsure = F.binary_cross_entropy_with_logits(chance, 1 - lost, reduction="none")
                step = step + config.confidence_weight * (unsure * wanted).mean()
            result = result + weight * step
        return result

    def outputs(self, seen: Observed, starts: DraftStarts) -> torch.Tensor:
        """Outputs ``[N, drafts, d]`` of blocks whose anchor is the token after each of N starts."""
        head, config = self.head, self.head.config
        size, (windows, width) = config.block_size, seen.ids.shape
        device = seen.ids.device
        rows = torch.full((len(starts.flat), size), config.mask_token, device=device)
        rows[:, 0] = seen.ids.flatten()[starts.ahead(1)]
        with torch.no_grad():
            embeds = self.target.get_input_embeddings()(rows.flatten())
        positions = torch.arange(width, device=device).repeat(windows)
        context = list(head.context(seen.features.flatten(0, 1), positions))
        within = starts.position[:, None] + 1 + torch.arange(size, device=device)
        outputs: torch.Tensor = head(
            embeds, within.flatten(), DraftAttention(starts, None, context, size, config.causal)
        )
        return outputs.view(len(rows), size, -1)[:, -config.drafts :]

    def logits(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Of outputs ``[N, d]`` behind the tokens ``before [N]``: ``[N, vocab]``."""
        logits: torch.Tensor = self.target.get_output_embeddings()(outputs)
        bias = self.head.bias(outputs, before)
        return logits if bias is None else logits + bias

    def levels(self, seen: Observed, starts: DraftStarts, length: int) -> Iterator[torch.Tensor]:
        outputs, before = self.outputs(seen, starts), seen.ids.flatten()[starts.ahead(1)]
        for output in outputs[:, :length].unbind(1):
            before = self.logits(output, before).argmax(-1)
            yield before

    def write_head(self, folder: Path) -> None:
        save_block(self.head, folder)
