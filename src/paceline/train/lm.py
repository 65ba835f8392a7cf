"""Training a small Llama-architecture model from text, or distilling one from a larger model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import ConfigError, DataError
from paceline.files import folder_aside
from paceline.model.loading import load_module, load_tokenizer
from paceline.train.chat import own_text
from paceline.train.configs import LMConfig as LMConfig
from paceline.train.data import Mixture
from paceline.train.losses import distillation_loss, rows_that_count
from paceline.train.masks import MaskedRows
from paceline.train.records import Records
from paceline.train.tokenizer import END_OF_TURN, train_tokenizer
from paceline.train.trainer import Progress, Trainer, run_name, save_model

_VALIDATED = 16  # windows of each validation file


class LMTrainer(Trainer):
    """Trains a model; it lies in ``out/model`` in the end."""

    config: LMConfig
    tv_weight = 0.0  # share of total variation in the distillation

    def check(self) -> None:
        if not 0 <= self.config.text_weight + self.config.argmax_weight <= 1:
            raise ConfigError("text_weight and argmax_weight must be shares that sum to at most 1")

    def prepare(self) -> None:
        config = self.config
        self.tokenizer = self._tokenizer()
        streams = [self.stream_of(source) for source in self.sources]
        weights = [source.weight for source in self.sources]
        self.mixture = Mixture(streams, weights, config.seed, config.seq_len)
        self.long_len = max(config.seq_len, min(config.max_positions, self.mixture.longest))
        # What drafts is measured by its acceptance instead.
        measured = self.valid_sources if self.measured == "validation" else []
        self.validation = {source.name: self.stream_of(source) for source in measured}
        torch.manual_seed(config.seed)
        self.learner = self.model = self._new_model().train()
        self.teacher: PreTrainedModel | None = None
        if config.teacher is not None:
            self.teacher = self._load(config.teacher).requires_grad_(False)
        # Two shapes (short and long windows), each compiled once; needs a C++ compiler on CPU.
        self._loss = (
            torch.compile(self._eager_loss, dynamic=False) if self.compiled else self._eager_loss
        )

    # -- set-up ----------------------------------------------------------------------------

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        folder = self.out / "model"
        source = self.config.teacher or self.config.init or self.config.tokenizer
        if source is not None:
            return load_tokenizer(source)
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(str(folder))
        texts = (
            text
            for item in self.sources
            for record in Records(item.path, self.config.exclude_licenses)
            if (text := own_text(record))
        )
        with stage(f"training a tokenizer of {self.config.vocab_size:,} tokens"):
            tokenizer = train_tokenizer(texts, self.config.vocab_size)
        with folder_aside(folder, "the tokenizer") as partial:
            tokenizer.save_pretrained(partial)
        return tokenizer

    def _new_model(self) -> PreTrainedModel:
        from transformers import LlamaConfig, LlamaForCausalLM

        config, tokenizer = self.config, self.tokenizer
        if config.init is not None:
            return self._load(config.init)
        known = tokenizer.get_vocab()
        ends = (tokenizer.eos_token_id, known.get(END_OF_TURN))
        eos = [token for token in ends if token is not None]
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
            eos_token_id=eos,
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
        with folder_aside(self.out / "model", "the model") as folder:
            save_model(self.model, self.tokenizer, folder)
        return self.out / "model"

    # -- the loop --------------------------------------------------------------------------

    def masks(self, seq_len: int) -> MaskedRows | None:
        """Rows of masks that learn, too, at this step."""
        return None

    def _eager_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        shares: torch.Tensor,
        masks: MaskedRows | None,
    ) -> torch.Tensor:
        """Loss of inputs, next tokens and their shares of it, ``[rows, seq_len]``."""
        positions: Any = slice(None)
        read = {"input_ids": inputs}
        if masks is not None:
            read, positions = masks.inputs(inputs), masks.positions
            shares = shares * (inputs.shape[1] / len(positions))
        logits = self.model(**read, use_cache=False).logits.flatten(0, 1)
        targets, shares = (part[:, positions].flatten() for part in (targets, shares))
        if self.teacher is None:
            shares, logits, targets = rows_that_count(shares, logits, targets)
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            return (losses * shares).sum()
        with torch.no_grad():
            teacher = self.teacher(input_ids=inputs, use_cache=False).logits
            teacher = teacher[:, positions].flatten(0, 1)
        width = min(logits.shape[1], teacher.shape[1])  # either may be padded
        shares, logits, teacher, targets = rows_that_count(
            shares, logits[:, :width], teacher[:, :width], targets
        )
        weights = self.config.text_weight, self.config.argmax_weight, self.tv_weight
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
        starts = range(0, len(windows), size)
        for start in starts[self.rank :: self.ranks]:
            part = windows[start : start + size]
            inputs, masks = part[:, :-1].contiguous(), self.masks(seq_len)
            yield self._loss(inputs, part[:, 1:], shares[start : start + size], masks)

    @torch.no_grad()
    def evaluate(self, progress: Progress) -> None:
        """Nats per token to be learnt, on each validation file (of the text, also when
        distilling)."""
        super().evaluate(progress)
        self.model.eval()
        for name, stream in self.validation.items():
            length = min(self.config.seq_len, len(stream.ids) - 1)
            starts = range(0, len(stream.ids) - length, max(1, length))
            windows = [slice(start, start + length + 1) for start in starts]
            windows = [part for part in windows if stream.learn[part][1:].any()][:_VALIDATED]
            if length < 1 or not windows:
                raise DataError(f"validation file {name} is too short to measure")
            total, count = 0.0, 0
            with stage(f"validating on {name}", len(windows), "windows") as doing:
                for window in windows:
                    ids = torch.from_numpy(stream.ids[window].astype(np.int64)).to(self.device)
                    learn = torch.from_numpy(stream.learn[window][1:]).to(self.device)
                    logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                    nats = F.cross_entropy(logits.float(), ids[1:], reduction="none")
                    total += float((nats * learn).sum())
                    count += int(learn.sum())
                    doing.advance()
            progress.validation[name] = total / count
        self.model.train()

    def about(self) -> str:
        config = self.config
        origin = "the text of the files below"
        if config.teacher is not None:
            origin = f"the probabilities of `{run_name(config.teacher)}` on the files below"
        return (
            f"A Llama-architecture language model with {self.model.num_parameters():,} "
            f"parameters ({config.layers} layers x {config.hidden_size}, vocabulary "
            f"{len(self.tokenizer)}, context {config.max_positions}), trained by Paceline from "
            f"{origin}, in bf16 with float32 master weights.\n\n"
            "It is small: it shows and tests speculative decoding. Its statements are often wrong."
        )
