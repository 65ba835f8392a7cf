"""Draft models for a given target, distilled on the user's own text.

A sampled token is accepted with chance sum_x min(p(x), q(x)) = 1 - TV(p, q). The forward KL
divergence (Hinton et al. 2015) bounds it and learns fast from nothing; total variation finishes
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.files import atomic_folder
from paceline.model.loading import load_module, load_tokenizer
from paceline.model.tokenizer import differences
from paceline.train.acceptance import AcceptanceCounts, WrittenText, context_of, walk
from paceline.train.configs import DraftConfig as DraftConfig
from paceline.train.data import Mixture
from paceline.train.losses import distillation_loss, rows_that_count
from paceline.train.trainer import Trainer, run_name, save_model
from paceline.train.unrolled import MaskedRows

_LOSSES = {
    "kl": "the KL divergence",
    "tv": "total variation",
    "mixed": "KL divergence and total variation",
}


class DraftTrainer(Trainer):
    """Trains a draft; it lies in ``out/model`` in the end.

    Raises VocabularyMismatchError if the draft to start from speaks another vocabulary.
    """

    config: DraftConfig
    noun = "draft"
    model: PreTrainedModel
    long_len: int  # tokens of a long window

    def check(self) -> None:
        config = self.config
        if config.text_weight + config.argmax_weight > 1:
            raise ConfigError("text_weight and argmax_weight must be shares that sum to at most 1")
        misfit = config.hidden_size % (2 * config.heads) or config.heads % config.kv_heads
        if config.init is None and misfit:
            raise ConfigError(
                f"--hidden-size {config.hidden_size} must be an even multiple of --heads "
                f"{config.heads}, and that a multiple of --kv-heads {config.kv_heads}"
            )

    def prepare(self) -> None:
        self.tokenizer = self._tokenizer()
        self.begin()
        self.drafts_for = self._load(self.config.model).requires_grad_(False)
        limits = [context_of(model, sys.maxsize) for model in (self.model, self.drafts_for)]
        self.long_len = max(self.config.seq_len, min(self.long_len, *limits))

    def begin(self) -> None:
        """Read the data and make the model, once there is a tokenizer."""
        config = self.config
        streams = [self.stream_of(source) for source in self.sources]
        weights = [source.weight for source in self.sources]
        self.mixture = Mixture(streams, weights, config.seed, config.seq_len)
        self.long_len = max(config.seq_len, min(config.max_positions, self.mixture.longest))
        torch.manual_seed(config.seed)
        self.learner = self.model = self.new_model().train()
        # Two shapes (short and long windows), each compiled once; needs a C++ compiler on CPU.
        self._loss = torch.compile(self.loss, dynamic=False) if self.compiled else self.loss

    # -- set-up ----------------------------------------------------------------------------

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """The target's."""
        config = self.config
        tokenizer = load_tokenizer(config.model)
        if config.init is not None:
            differing = differences(tokenizer, load_tokenizer(config.init))
            if differing:
                raise VocabularyMismatchError(
                    f"draft {config.init} and target {config.model} differ in "
                    f"{differing}; start from a model of the target's family, or leave --init "
                    "out for a new one"
                )
        return tokenizer

    def new_model(self) -> PreTrainedModel:
        """What is trained, with its first weights."""
        config = self.config
        model = self._new_llama() if config.init is None else self._load(config.init)
        if config.parallel:
            model.config.pard_token = self.mask_token
        return model

    def _new_llama(self) -> PreTrainedModel:
        from transformers import LlamaConfig, LlamaForCausalLM

        config, tokenizer = self.config, self.tokenizer
        llama = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
        model = LlamaForCausalLM(llama)
        with torch.no_grad():  # residual branches start small, as deep narrow stacks need
            for layer in model.model.layers:
                for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    out.weight.mul_((2 * config.layers) ** -0.5)
        return model.to(device=self.device, dtype=torch.bfloat16)

    def _load(self, name: str) -> PreTrainedModel:
        with stage(f"loading {name}"):
            module: PreTrainedModel = load_module(name, torch.bfloat16, self.device, "sdpa")
        return module

    def write_result(self) -> Path:
        """Config, tokenizer and bf16 safetensors go to ``out/model``, all at once."""
        with atomic_folder(self.out / "model", "the model") as folder:
            save_model(self.model, self.tokenizer, folder)
        return self.out / "model"

    # -- the loop --------------------------------------------------------------------------

    def _masks(self, seq_len: int) -> MaskedRows | None:
        """Rows of masks that learn, too, at this step."""
        if not self.config.parallel:
            return None
        dropped = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        mask, count = self.model.config.pard_token, self.config.draft_length
        return MaskedRows.of(mask, seq_len, count, generator=dropped)

    def loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        shares: torch.Tensor,
        masks: MaskedRows | None,
    ) -> torch.Tensor:
        """Loss of inputs, next tokens and their shares of it, ``[rows, seq_len]``."""
        config, read = self.config, {"input_ids": inputs}
        positions: Any = slice(None)
        if masks is not None:
            read, positions = masks.inputs(inputs), masks.positions
            shares = shares * (inputs.shape[1] / len(positions))
        logits = self.model(**read, use_cache=False).logits.flatten(0, 1)
        targets, shares = (part[:, positions].flatten() for part in (targets, shares))
        with torch.no_grad():
            teacher = self.drafts_for(input_ids=inputs, use_cache=False).logits
            teacher = teacher[:, positions].flatten(0, 1)
        width = min(logits.shape[1], teacher.shape[1])  # either may be padded
        shares, logits, teacher, targets = rows_that_count(
            shares, logits[:, :width], teacher[:, :width], targets
        )
        tv_weight = {"kl": 0.0, "tv": 1.0, "mixed": config.tv_weight}[config.loss]
        weights = config.text_weight, config.argmax_weight, tv_weight
        return (distillation_loss(logits, teacher, targets, *weights) * shares).sum()

    def losses(self) -> Iterator[torch.Tensor]:
        config = self.config
        seq_len = self.long_len if self.is_long(self.step) else config.seq_len
        rows = max(1, config.batch_tokens // seq_len)
        ids, learn = self.mixture.windows(self.step, rows, seq_len)
        windows = torch.from_numpy(ids).to(self.device)
        shares = torch.from_numpy(learn).to(self.device)[:, 1:].float()
        shares /= shares.sum().clamp(min=1)
        size = max(1, config.micro_tokens // seq_len)
        for start in range(0, len(windows), size):
            part = windows[start : start + size]
            inputs, masks = part[:, :-1].contiguous(), self._masks(seq_len)
            yield self._loss(inputs, part[:, 1:], shares[start : start + size], masks)

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
            f"A draft model for `{run_name(config.model)}`: {type(self.model).__name__} "
            f"with {self.model.num_parameters():,} parameters, trained by Paceline from {start} on "
            f"{_LOSSES[config.loss]} from the target's probabilities, in bf16 with float32 master "
            "weights. It speaks the target's vocabulary: "
            "`paceline generate --model TARGET --draft FOLDER`."
        )
