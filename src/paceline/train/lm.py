"""Training a small Llama-architecture model from text, or distilling one from a larger model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigError, DataError
from paceline.files import folder_aside
from paceline.model.loading import load_module, load_tokenizer, resolve_device
from paceline.stages import stage
from paceline.train.acceptance import AcceptanceCounts
from paceline.train.chat import own_text
from paceline.train.data import Mixture, Source, Stream, read_records
from paceline.train.losses import distillation_loss, rows_that_count, text_loss
from paceline.train.optim import MasterOptimizer
from paceline.train.parallel import Team
from paceline.train.saved_run import previous, read_state, save_model, write_state
from paceline.train.token_streams import TokenStreams
from paceline.train.tokenizer import END_OF_TURN, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
    from typing_extensions import Self


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
    loss_on: str = "assistant"  # of conversations, learn an assistant's tokens, or all

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
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
    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)  # of a draft, by file


def run_name(model: str) -> str:
    """A model without its folders: ``runs/target/model`` is "target"."""
    path = Path(model)
    return path.parent.name if path.name == "model" else path.name


def _longest_window(stream: Stream) -> int:
    """Longest window, without its last target, that Mixture can draw from a stream."""
    return len(stream.ids) - 2


def learning_rate_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then linear decay to zero at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


class LMTrainer:
    """One resumable run. The folder ``out`` holds checkpoint.pt, token streams and the result."""

    def __init__(
        self, config: LMConfig, out: Path, device: str = "auto", compiled: bool = False
    ) -> None:
        if not 0 <= config.text_weight + config.argmax_weight <= 1:
            raise ConfigError("text_weight and argmax_weight must be shares that sum to at most 1")
        self.config, self.out, self.compiled = config, out, compiled
        self.team, self.alone = Team(), ""
        self.device = resolve_device(device)
        self.sources = [Source.parse(spec) for spec in config.data]
        self.valid_sources = [Source.parse(spec) for spec in config.valid]
        saved = self._read_checkpoint()
        self.tokenizer = self._tokenizer()
        streams = [self._stream(source) for source in self.sources]
        self.long_len = self._long_windows(streams)
        self.mixture = Mixture(streams, [s.weight for s in self.sources], config.seed)
        self.validation = self._validation()
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
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.history = saved["step"], saved["history"]

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
            for record in read_records(item.path, self.config.exclude_licenses)
            if (text := own_text(record))
        )
        with stage(f"training a tokenizer of {self.config.vocab_size:,} tokens"):
            tokenizer = train_tokenizer(texts, self.config.vocab_size)
        with folder_aside(folder, "the tokenizer") as partial:
            tokenizer.save_pretrained(partial)
        return tokenizer

    def _long_windows(self, streams: Sequence[Stream]) -> int:
        """Tokens of the long windows. Raises DataError if a file has no room for short ones."""
        for source, stream in zip(self.sources, streams, strict=True):
            if len(stream.ids) < self.config.seq_len + 2:
                raise DataError(
                    f"{source.path} has only {len(stream.ids)} tokens of text, but a window takes "
                    f"{self.config.seq_len + 2}; give more text or a shorter --seq-len"
                )
        return max(
            self.config.seq_len, min(self.config.max_positions, *map(_longest_window, streams))
        )

    def _stream(self, source: Source) -> Stream:
        config = self.config
        kept = TokenStreams(
            self.out / "tokens", self.tokenizer, config.exclude_licenses, config.loss_on
        )
        stream = kept.read(source)
        kept.keep(source, stream)
        return stream

    def _validation(self) -> dict[str, Stream]:
        """What the text loss is measured on."""
        return {source.name: self._stream(source) for source in self.valid_sources}

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

    def _load_teacher(self) -> PreTrainedModel | None:
        if self.config.teacher is None:
            return None
        return self._load(self.config.teacher).requires_grad_(False)

    def _load(self, name: str) -> PreTrainedModel:
        with stage(f"loading {name}"):
            module: PreTrainedModel = load_module(name, torch.bfloat16, self.device, "sdpa")
        return module

    # -- checkpoints -----------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def _read_checkpoint(self) -> dict[str, Any] | None:
        saved, self.note = read_state(self.checkpoint)
        if saved is None:
            return None
        own, before = asdict(self.config), saved["config"]
        # The length of the schedule may change on resumption; anything else would be another run.
        differing = [key for key in own.keys() | before.keys() if before.get(key) != own.get(key)]
        if set(differing) - {"steps"}:
            raise ConfigError(
                f"{self.out} holds a run with other options ({', '.join(sorted(differing))}); "
                "use another --out or delete it"
            )
        return saved

    def save_checkpoint(self) -> None:
        """Replace checkpoint.pt as a whole. Raises WriteError; the former one then stands."""
        state = {
            "config": asdict(self.config),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history,
        }
        write_state(self.checkpoint, state)

    def save_model(self) -> Path:
        """Write config, tokenizer and bf16 safetensors to ``out/model``, all at once.

        Raises WriteError; what was there before then stands.
        """
        # Names without folders: the file travels with the weights.
        config = asdict(self.config)
        for key in ("data", "valid"):
            config[key] = [Path(spec).name for spec in config[key]]
        for key in ("teacher", "tokenizer", "init"):
            config[key] = config[key] and run_name(config[key])
        notes = json.dumps({"config": config, "history": self.history}, indent=1) + "\n"
        with folder_aside(self.out / "model", "the model") as folder:
            save_model(self.model, self.tokenizer, folder)
            (folder / "training.json").write_text(notes, encoding="utf-8")
        return self.out / "model"

    # -- the loop --------------------------------------------------------------------------

    def _eager_loss(
        self, inputs: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Loss of ``[rows, seq_len]`` inputs and ``[rows * seq_len]`` next tokens, each of which
        counts for its share."""
        logits = self.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        if self.teacher is None:
            shares, logits, targets = rows_that_count(shares, logits, targets)
            return text_loss(logits, targets, shares)
        with torch.no_grad():
            teacher = self.teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        return self._distilled(logits, teacher, targets, shares)

    def _distilled(
        self,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        targets: torch.Tensor,
        shares: torch.Tensor,
        tv_weight: float = 0.0,
    ) -> torch.Tensor:
        config = self.config
        shares, logits, teacher, targets = rows_that_count(shares, logits, teacher, targets)
        return distillation_loss(
            logits, teacher, targets, config.text_weight, config.argmax_weight, tv_weight, shares
        )

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows of ids, and which tokens of them are to be learnt."""
        config = self.config
        long = config.long_every > 0 and step % config.long_every == config.long_every - 1
        seq_len = self.long_len if long else config.seq_len
        rows = max(1, config.batch_tokens // seq_len)
        ids, learn = self.mixture.windows(step, rows, seq_len)
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(learn).to(self.device)

    def learnt(self) -> list[nn.Parameter]:
        """What the processes of a team add up the gradients of."""
        return list(self.model.parameters())

    def train_step(self) -> float:
        """One optimizer step; returns the mean loss over the tokens to be learnt."""
        windows, learn = self._batch(self.step)
        seq_len = windows.shape[1] - 1
        shares = learn[:, 1:].float()
        shares /= shares.sum().clamp(min=1)
        size = max(1, self.config.micro_tokens // seq_len)
        total = 0.0
        starts = range(0, len(windows), size)
        for start in self.team.share(starts, lambda start: 1)[self.team.rank]:
            part = windows[start : start + size]
            inputs, targets = part[:, :-1].contiguous(), part[:, 1:].reshape(-1)
            loss = self._loss(inputs, targets, shares[start : start + size].reshape(-1))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        total = self.team.add_up(self.learnt(), total)
        scale = learning_rate_scale(self.step, self.config.steps, self.config.warmup)
        self.optimizer.step(scale)
        self.step += 1
        return total

    @torch.no_grad()
    def validate(self, max_windows: int = 16) -> dict[str, float]:
        """Nats per token to be learnt, on each validation file (of the text, also when
        distilling)."""
        self.model.eval()
        losses = {}
        for name, stream in self.validation.items():
            length = min(self.config.seq_len, len(stream.ids) - 1)
            windows = [
                slice(start, start + length + 1)
                for start in range(0, len(stream.ids) - length, max(1, length))
                if stream.learn[start + 1 : start + length + 1].any()
            ]
            if length < 1 or not windows:
                raise DataError(f"validation file {name} is too short to measure")
            total, count = 0.0, 0
            with stage(f"validating on {name}", len(windows[:max_windows]), "windows") as doing:
                for window in windows[:max_windows]:
                    ids = torch.from_numpy(stream.ids[window].astype(np.int64)).to(self.device)
                    shares = torch.from_numpy(stream.learn[window][1:]).to(self.device).float()
                    logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                    total += float(text_loss(logits, ids[1:], shares))
                    count += int(shares.sum())
                    doing.advance()
            losses[name] = total / count
        self.model.train()
        return losses

    def evaluate(self, progress: Progress) -> None:
        """Measure on held-out data, into ``progress`` and the history."""
        progress.validation = self.validate()
        self.history.append(
            {"step": self.step, "loss": progress.loss, "validation": progress.validation}
        )

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
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
                self.evaluate(progress)
            on_progress(progress)
            if time.monotonic() - saved > save_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
        self.save_checkpoint()
        folder = self.save_model()
        previous(self.checkpoint).unlink(missing_ok=True)
        return folder
