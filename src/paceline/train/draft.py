"""Draft models for a given target, distilled on the user's own text.

A sampled token is accepted with chance sum_x min(p(x), q(x)) = 1 - TV(p, q). The forward KL
divergence (Hinton et al. 2015) bounds it and learns fast from nothing; total variation finishes
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.model.loading import load_tokenizer
from paceline.model.tokenizer import differences
from paceline.train.acceptance import AcceptanceCounts, WrittenText, context_of, walk
from paceline.train.configs import DraftConfig as DraftConfig
from paceline.train.lm import LMTrainer
from paceline.train.masks import MaskedRows
from paceline.train.tokenizer import mask_token
from paceline.train.trainer import DraftingTrainer, run_name

_LOSSES = {
    "kl": "the KL divergence",
    "tv": "total variation",
    "mixed": "KL divergence and total variation",
}


class DraftTrainer(DraftingTrainer, LMTrainer):
    """Trains a draft; it lies in ``out/model`` in the end.

    Raises VocabularyMismatchError if the draft to start from speaks another vocabulary, and what
    LMTrainer raises.
    """

    config: DraftConfig
    noun = "draft"

    def check(self) -> None:
        config = self.config
        if config.teacher is None:
            raise ConfigError("a draft needs a target to learn from; give --target MODEL")
        misfit = config.hidden_size % (2 * config.heads) or config.heads % config.kv_heads
        if config.init is None and misfit:
            raise ConfigError(
                f"--hidden-size {config.hidden_size} must be an even multiple of --heads "
                f"{config.heads}, and that a multiple of --kv-heads {config.kv_heads}"
            )
        self.tv_weight = {"kl": 0.0, "tv": 1.0, "mixed": config.tv_weight}[config.loss]
        super().check()

    def prepare(self) -> None:
        super().prepare()
        assert self.teacher is not None
        self.drafts_for = self.teacher
        limits = [context_of(model, sys.maxsize) for model in (self.model, self.teacher)]
        self.long_len = max(self.config.seq_len, min(self.long_len, *limits))

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer()
        if self.config.init is not None:
            differing = differences(tokenizer, load_tokenizer(self.config.init))
            if differing:
                raise VocabularyMismatchError(
                    f"draft {self.config.init} and target {self.config.teacher} differ in "
                    f"{differing}; start from a model of the target's family, or leave --draft "
                    "out for a new one"
                )
        return tokenizer

    def _new_model(self) -> PreTrainedModel:
        model = super()._new_model()
        if self.config.parallel:
            model.config.pard_token = mask_token(self.tokenizer)
        return model

    def masks(self, seq_len: int) -> MaskedRows | None:
        if not self.config.parallel:
            return None
        dropped = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        mask, count = self.model.config.pard_token, self.config.draft_length
        return MaskedRows.of(mask, seq_len, count, generator=dropped)

    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        # A drafted token counts only where all before it were right, so one forward over the
        # target's own text says what the draft would have proposed there.
        ids = torch.tensor(text.token_ids, device=self.device)
        count, first = self.config.draft_length, text.prompt - 1
        wanted = F.pad(ids[text.prompt :], (0, count - 1), value=-1).unfold(0, count, 1)
        self.model.eval()
        if self.config.parallel:
            padded = F.pad(ids[None, :-1], (0, count - 1))
            width = padded.shape[1]
            masks = MaskedRows.of(self.model.config.pard_token, width, count, first)
            choices = self.model(**masks.inputs(padded), use_cache=False).logits[0].argmax(-1)
            rows = torch.cat((choices[first : first + len(wanted)], choices[width:]))
            drafted = rows.view(count, -1).T
        else:
            choices = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0].argmax(-1)
            drafted = F.pad(choices[first:], (0, count - 1), value=-1).unfold(0, count, 1)
        self.model.train()
        return walk((drafted == wanted) & (wanted >= 0), undrafted=0)

    def about(self) -> str:
        config = self.config
        start = "new weights" if config.init is None else f"`{run_name(config.init)}`"
        return (
            f"A draft model for `{run_name(str(config.teacher))}`: {type(self.model).__name__} "
            f"with {self.model.num_parameters():,} parameters, trained by Paceline from {start} on "
            f"{_LOSSES[config.loss]} from the target's probabilities, in bf16 with float32 master "
            "weights. It speaks the target's vocabulary: "
            "`paceline generate --model TARGET --draft FOLDER`."
        )
