"""Distillation of draft models.

A sampled token is accepted with probability sum_x min(p(x), q(x)) = 1 - TV(p, q). The forward KL
divergence (Hinton et al. 2015) bounds the total variation distance TV and learns fast from new
weights; TV itself is best for the last steps (DistillSpec, Zhou et al. 2023, arXiv 2310.08461)."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline.errors import ConfigError, VocabularyMismatchError
from paceline.files import atomic_folder
from paceline.model.loading import load_tokenizer
from paceline.model.tokenizer import differences
from paceline.train.acceptance import AcceptanceCounts, HeldOutText, max_context, simulate_decoding
from paceline.train.configs import DraftConfig as DraftConfig
from paceline.train.data import Windows
from paceline.train.losses import distribution_loss, teacher_probs, token_log_probs
from paceline.train.trainer import Trainer, run_name
from paceline.train.unrolled import MaskedRows

_SHAPE = ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")


class DraftTrainer(Trainer):
    """Trains a draft model; the result is in ``out/model``. Raises VocabularyMismatchError if the
    model to continue from has another vocabulary than the target."""

    config: DraftConfig
    noun = "draft"
    model: PreTrainedModel

    def check(self) -> None:
        config = self.config
        given = [name for name in _SHAPE if getattr(config, name) != getattr(DraftConfig, name)]
        if config.init is not None and given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is an option of new models, but --init "
                f"{config.init} has a shape already; leave out one of them"
            )
        invalid = config.hidden_size % (2 * config.heads) or config.heads % config.kv_heads
        if config.init is None and invalid:
            raise ConfigError(
                f"--hidden-size {config.hidden_size} must be an even multiple of --heads "
                f"{config.heads}, which must be a multiple of --kv-heads {config.kv_heads}"
            )

    def prepare(self) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        if config.init is not None:
            differing = differences(self.tokenizer, load_tokenizer(config.init))
            if differing:
                raise VocabularyMismatchError(
                    f"draft {config.init} and target {config.model} differ in "
                    f"{differing}; give a model of the target's family, or leave out --init to "
                    "train a new one"
                )
        self.target = self.load(config.model).requires_grad_(False)
        self._teacher = self.compile_if_asked(self.target)
        self.begin(max_context(self.target, sys.maxsize))

    def begin(self, context: int = sys.maxsize) -> None:
        """Create the model and read the data; needs the tokenizer and the target's ``context``."""
        torch.manual_seed(self.config.seed)
        self.learner = self.model = self.new_model().train()
        self._student = self.compile_if_asked(self.model)
        self.read_data(min(context, max_context(self.model, context)))

    def new_model(self) -> PreTrainedModel:
        """The model to train, with its initial weights."""
        config = self.config
        model = self._new_llama() if config.init is None else self.load(config.init)
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
        with torch.no_grad():  # small residual branches, which deep and narrow models need
            for layer in model.model.layers:
                for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    out.weight.mul_((2 * config.layers) ** -0.5)
        return model.to(device=self.device, dtype=self.dtype)

    def write_result(self) -> None:
        with atomic_folder(self.folder, "the model") as folder:
            self.stored().save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def loss(self, windows: Windows) -> torch.Tensor:
        ids, loss_mask = windows.ids.to(self.device), windows.loss_mask[:, 1:].to(self.device)
        inputs = ids[:, :-1].contiguous()
        with torch.no_grad():
            teacher = self._teacher(input_ids=inputs, use_cache=False).logits
        student_inputs, positions = {"input_ids": inputs}, torch.arange(inputs.shape[1])
        weights = torch.ones(inputs.shape, device=self.device)
        if self.config.parallel:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
            sizes = inputs.shape[1], self.config.draft_length
            masks = MaskedRows.of(self.model.config.pard_token, *sizes, generator=generator)
            student_inputs, positions = masks.inputs(inputs), masks.positions
            weights = masks.reach_probs(token_log_probs(teacher, inputs))
        rows = loss_mask[:, positions].flatten().nonzero()[:, 0]
        logits = self._student(**student_inputs, use_cache=False).logits.flatten(0, 1)[rows]
        teacher = teacher[:, positions].flatten(0, 1)
        width = min(logits.shape[1], teacher.shape[1])  # either vocabulary may be padded
        share = self.config.argmax_weight
        probs = teacher_probs(rows, lambda some: teacher[some, :width], share)
        weights = weights.flatten()[rows]
        weights = weights / weights.sum().clamp(min=1e-6)
        index, tv_weight = torch.arange(len(rows), device=rows.device), self.config.tv_weight
        return distribution_loss(logits[:, :width], probs, index, weights, tv_weight)

    def acceptance_of(self, text: HeldOutText) -> AcceptanceCounts:
        # A draft token counts only if all before it were right. So one forward over the target's
        # own text gives the drafts at all positions (teacher forcing).
        ids = torch.tensor(text.token_ids, device=self.device)
        count, first = self.config.draft_length, text.prompt - 1
        expected = F.pad(ids[text.prompt :], (0, count - 1), value=-1).unfold(0, count, 1)
        self.model.eval()
        if self.config.parallel:
            padded = F.pad(ids[None, :-1], (0, count - 1))
            width = padded.shape[1]
            masks = MaskedRows.of(self.model.config.pard_token, width, count, first)
            choices = self.model(**masks.inputs(padded), use_cache=False).logits[0].argmax(-1)
            rows = torch.cat((choices[first : first + len(expected)], choices[width:]))
            drafted = rows.view(count, -1).T
        else:
            choices = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0].argmax(-1)
            drafted = F.pad(choices[first:], (0, count - 1), value=-1).unfold(0, count, 1)
        self.model.train()
        return simulate_decoding((drafted == expected) & (expected >= 0), undrafted=0)

    def describe(self) -> str:
        config = self.config
        start = "new weights" if config.init is None else f"`{run_name(config.init)}`"
        return (
            f"A draft model for `{run_name(config.model)}`: {type(self.model).__name__} "
            f"with {self.model.num_parameters():,} parameters, trained by Paceline from {start} on "
            f"the target's probabilities, in {self.stored_dtype} with float32 master weights. It "
            "has the target's vocabulary: `paceline generate --model TARGET --draft FOLDER`."
        )
