"""Training a small Llama-architecture model from text, or distilling one from a larger model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.errors import ConfigError, DataError
from paceline.train.data import Mixture, Source, encode, read_records, render
from paceline.train.optim import MasterOptimizer
from paceline.train.tokenizer import END_OF_TURN, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class LMConfig:
    """Everything that determines a training run. Sizes in tokens, rates per step."""

    data: tuple[str, ...]  # FILE or FILE=WEIGHT
    valid: tuple[str, ...] = ()
    exclude_licenses: tuple[str, ...] = ("CC-BY-SA",)
    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    ffn_size: int = 768
    max_positions: int = 1024
    seq_len: int = 256
    long_every: int = 10  # every n-th batch has windows of max_positions, at the same token count
    batch_tokens: int = 8192
    micro_tokens: int = 2048
    steps: int = 1500
    warmup: int = 50
    lr: float = 0.005
    adam_lr: float = 0.004
    weight_decay: float = 0.05
    seed: int = 0
    teacher: str | None = None  # distil from this model; its tokenizer is used
    text_weight: float = 0.1  # share of the plain text loss when distilling
    argmax_weight: float = 0.0  # share of the loss against the teacher's likeliest token
    tokenizer: str | None = None
    init: str | None = None  # start from the weights (and the tokenizer) of this folder

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LMConfig:
        names = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ConfigError(f"unknown training options {unknown}; known are {sorted(names)}")
        frozen: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**frozen)


@dataclass
class Progress:
    """What the training reports after every step."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    validation: dict[str, float] = field(default_factory=dict)  # nats per token, by file


def learning_rate_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then linear decay to zero at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    text_weight: float,
    argmax_weight: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy against the teacher's probabilities, its likeliest token, and the text.

    Shapes ``[tokens, vocab]``, ``[tokens, vocab]``, ``[tokens]``. The first term equals
    KL(teacher || student) up to the teacher's entropy (Hinton et al. 2015; DistillSpec) and
    serves sampling; greedy acceptance asks for nothing but the likeliest token.
    """
    log_q = F.log_softmax(logits.float(), dim=-1)
    p = F.softmax(teacher_logits.float(), dim=-1)
    loss = -(1 - text_weight - argmax_weight) * (p * log_q).sum(-1).mean()
    if text_weight:
        loss = loss + text_weight * F.nll_loss(log_q, targets)
    if argmax_weight:
        loss = loss + argmax_weight * F.nll_loss(log_q, teacher_logits.argmax(-1))
    return loss


class LMTrainer:
    """One resumable run. The folder ``out`` holds checkpoint.pt, token streams and the result."""

    def __init__(
        self, config: LMConfig, out: Path, device: str = "auto", compiled: bool = False
    ) -> None:
        if not 0 <= config.text_weight + config.argmax_weight <= 1:
            raise ConfigError("text_weight and argmax_weight must be shares that sum to at most 1")
        self.config = config
        self.out = out
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        out.mkdir(parents=True, exist_ok=True)
        self.sources = [Source.parse(spec) for spec in config.data]
        self.valid_sources = [Source.parse(spec) for spec in config.valid]
        self.tokenizer = self._tokenizer()
        streams = [self._stream(source) for source in self.sources]
        self.mixture = Mixture(streams, [s.weight for s in self.sources], config.seed)
        self.validation = {s.name: self._stream(s) for s in self.valid_sources}
        torch.manual_seed(config.seed)
        self.model = self._new_model()
        self.teacher = self._load_teacher()
        # Two shapes (short and long windows), each compiled once; needs a C++ compiler on CPU.
        self._loss = (
            torch.compile(self._eager_loss, dynamic=False) if compiled else self._eager_loss
        )
        self.optimizer = MasterOptimizer(self.model, config.lr, config.adam_lr, config.weight_decay)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._resume()

    # -- set-up ----------------------------------------------------------------------------

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        folder = self.out / "model"
        source = self.config.teacher or self.config.init or self.config.tokenizer
        if source is not None:
            return PreTrainedTokenizerFast.from_pretrained(source)
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        texts = (
            render(record["text"])
            for item in self.sources
            for record in read_records(item.path, self.config.exclude_licenses)
        )
        tokenizer = train_tokenizer(texts, self.config.vocab_size)
        tokenizer.save_pretrained(folder)
        return tokenizer

    def _stream(self, source: Source) -> np.ndarray:
        cached = self.out / "tokens" / f"{source.path.name}.npy"
        if cached.is_file():
            return np.asarray(np.load(cached))
        stream = encode(source.path, self.tokenizer, self.config.exclude_licenses)
        cached.parent.mkdir(exist_ok=True)
        np.save(cached, stream)
        return stream

    def _new_model(self) -> PreTrainedModel:
        from transformers import LlamaConfig, LlamaForCausalLM

        config, tokenizer = self.config, self.tokenizer
        if config.init is not None:
            started = LlamaForCausalLM.from_pretrained(config.init, attn_implementation="sdpa")
            return started.to(device=self.device, dtype=torch.bfloat16)
        eos = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)]
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

    def _load_teacher(self) -> PreTrainedModel | None:
        if self.config.teacher is None:
            return None
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(self.config.teacher, dtype=torch.bfloat16)
        return teacher.to(self.device).eval().requires_grad_(False)

    # -- checkpoints -----------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        before = LMConfig.from_dict(saved["config"])
        # The length of the schedule may change on resumption; anything else would be another run.
        if replace(before, steps=self.config.steps) != self.config:
            raise ConfigError(
                f"{self.out} holds a run with other options; use another --out or delete it"
            )
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self.history = saved["history"]

    def save_checkpoint(self) -> None:
        """Write atomically, so that a cut-off leaves the former checkpoint whole."""
        state = {
            "config": asdict(self.config),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def save_model(self) -> Path:
        """Write config, tokenizer and bf16 safetensors to ``out/model``."""
        folder = self.out / "model"
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        # Names without folders: the file travels with the weights.
        config = asdict(self.config)
        for key in ("data", "valid"):
            config[key] = [Path(spec).name for spec in config[key]]
        for key in ("teacher", "tokenizer", "init"):
            config[key] = config[key] and Path(config[key]).parent.name
        (folder / "training.json").write_text(
            json.dumps({"config": config, "history": self.history}, indent=1) + "\n"
        )
        return folder

    # -- the loop --------------------------------------------------------------------------

    def _eager_loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss; ``[rows, seq_len]`` inputs and ``[rows * seq_len]`` next tokens."""
        logits = self.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        if self.teacher is None:
            return F.cross_entropy(logits.float(), targets)
        with torch.no_grad():
            teacher = self.teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        config = self.config
        return distillation_loss(logits, teacher, targets, config.text_weight, config.argmax_weight)

    def _batch(self, step: int) -> torch.Tensor:
        config = self.config
        long = config.long_every > 0 and step % config.long_every == config.long_every - 1
        seq_len = config.max_positions if long else config.seq_len
        rows = max(1, config.batch_tokens // seq_len)
        return torch.from_numpy(self.mixture.batch(step, rows, seq_len))

    def train_step(self) -> float:
        windows = self._batch(self.step).to(self.device)
        seq_len = windows.shape[1] - 1
        parts = torch.split(windows, max(1, self.config.micro_tokens // seq_len))
        total = 0.0
        for part in parts:
            inputs, targets = part[:, :-1].contiguous(), part[:, 1:].reshape(-1)
            loss = self._loss(inputs, targets) * (len(part) / len(windows))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        scale = learning_rate_scale(self.step, self.config.steps, self.config.warmup)
        self.optimizer.step(scale)
        self.step += 1
        return total

    @torch.no_grad()
    def validate(self, max_windows: int = 16) -> dict[str, float]:
        """Nats per token on each validation file (plain text loss, also when distilling)."""
        self.model.eval()
        losses = {}
        for name, stream in self.validation.items():
            length = min(self.config.seq_len, len(stream) - 1)
            if length < 1:
                raise DataError(f"validation file {name} is too short to measure")
            starts = range(0, len(stream) - length, length)[:max_windows]
            total = 0.0
            for start in starts:
                window = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))
                ids = window.to(self.device)[None]
                logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[0]
                total += float(F.cross_entropy(logits.float(), ids[0, 1:]))
            losses[name] = total / len(starts)
        self.model.train()
        return losses

    def run(
        self,
        report: Callable[[Progress], None] = lambda progress: None,
        eval_every: int = 250,
        save_seconds: float = 300.0,
    ) -> Path:
        """Train to the last step, then write the model; returns its folder."""
        self.model.train()
        saved = time.monotonic()
        while self.step < self.config.steps:
            start = time.monotonic()
            loss = self.train_step()
            speed = self.config.batch_tokens / (time.monotonic() - start)
            progress = Progress(self.step, self.config.steps, loss, speed)
            if self.step % eval_every == 0 or self.step == self.config.steps:
                progress.validation = self.validate()
                self.history.append(
                    {"step": self.step, "loss": loss, "validation": progress.validation}
                )
            report(progress)
            if time.monotonic() - saved > save_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
        self.save_checkpoint()
        return self.save_model()
