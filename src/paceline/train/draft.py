"""Draft models for a given target, distilled on the user's own text.

A sampled token is accepted with chance sum_x min(p(x), q(x)) = 1 - TV(p, q). The forward KL
divergence (Hinton et al. 2015) bounds it and learns fast from nothing; total variation finishes
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.model.loading import load_tokenizer
from paceline.model.tokenizer import differences
from paceline.train.acceptance import AcceptanceCounts, WrittenText, context_of, walk
from paceline.train.configs import DraftConfig as DraftConfig
from paceline.train.lm import LMTrainer
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

    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        # A drafted token counts only where all before it were right, so one forward over the
        # target's own text says what the draft would have proposed there.
        ids = torch.tensor(text.token_ids, device=self.device)
        self.model.eval()
        logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        self.model.train()
        right = logits[text.prompt - 1 :].argmax(-1) == ids[text.prompt :]
        beyond = F.pad(right, (0, self.config.draft_length - 1))
        return walk(beyond.unfold(0, self.config.draft_length, 1), undrafted=0)

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
