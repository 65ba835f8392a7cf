"""The training loop of all trainings, and the model card of a result. Batches depend only on the
seed and the step, so a resumed run continues exactly."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import ConfigError, DataError
from paceline.files import render_template, write_files
from paceline.model.loading import load_module, resolve_device, resolve_dtype
from paceline.train.acceptance import AcceptanceCounts, HeldOutText, load_held_out_texts, total
from paceline.train.checkpoint import lock_folder, read_state, write_state
from paceline.train.configs import TrainConfig
from paceline.train.data import Documents, Windows, load_token_stream
from paceline.train.optimizer import MasterOptimizer
from paceline.train.records import Records, Source, held_out_sources


def learning_rate_scale(step: int, steps: int, warmup: int) -> float:
    """The factor of the peak learning rate: linear warm-up, then linear decay to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def run_name(model: str) -> str:
    """A short name of a model: "target" for a folder ``runs/target/model``; else as it is."""
    path = Path(model)
    if not path.exists():
        return model
    return path.parent.name if path.name == "model" else path.name


@dataclass
class Progress:
    """The figures of a step; ``acceptance``, by validation file, if it was measured."""

    step: int
    loss: float
    tokens_per_second: float
    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)


class Trainer(ABC):
    """A resumable training of a draft model or head. The folder ``out`` has checkpoint.pt, token
    streams and the result. Acceptance is measured on held-out texts that the target generates.
    Raises PacelineError for unusable models, data or options, before it writes more than tokens."""

    result = "model"  # the subfolder of ``out`` for the result
    noun = "model"  # what the result is called in messages
    spec: str | None = ""  # the prefix of its folder in ``--draft``; None: it is not a draft
    # Parts of the names of matrices that AdamW optimises.
    adamw_names: tuple[str, ...] = ("embed", "lm_head", "mask_hidden")

    # Set by ``prepare``.
    learner: nn.Module  # the module that is trained
    tokenizer: PreTrainedTokenizerFast
    target: PreTrainedModel  # the target

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        device: str = "auto",
        compiled: bool = False,
        anew: bool = False,
    ) -> None:
        """``anew``: begin at step 0 even if ``out`` has a checkpoint, which is then replaced."""
        self.config, self.out, self.compiled = config, out, compiled
        self.checkpoint = out / "checkpoint.pt"
        self.check()
        self.device = resolve_device(device)
        self.sources = [Source.parse(spec) for spec in config.data]
        self.valid_sources = held_out_sources(config.valid)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        saved = None if anew else self._read_checkpoint()
        self.folder = out / self.result
        self.prepare()
        self.optimizer = MasterOptimizer(self.learner, config, self.adamw_names)
        if saved is not None:
            self.optimizer.load_state_dict(*saved["optimizers"])
            self.step, self.history = saved["step"], saved["history"]

    def check(self) -> None:  # noqa: B027
        """Raise ConfigError for invalid combinations of options, before any file is read."""

    @abstractmethod
    def prepare(self) -> None:
        """Load or create everything except the optimizer."""

    @abstractmethod
    def loss(self, windows: Windows) -> torch.Tensor:
        """The mean loss of a micro-batch."""

    @abstractmethod
    def acceptance_of(self, text: HeldOutText) -> AcceptanceCounts:
        """How many draft tokens the target would accept on one of its texts."""

    @abstractmethod
    def write_result(self) -> None:
        """Write the trained model or head to ``folder``, atomically. Raises WriteError."""

    @abstractmethod
    def describe(self) -> str:
        """A description of the result, for the model card."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which target and learner are computed. Torch's products of bf16 take five times as
        long as float32 on a CPU without bf16 instructions."""
        return resolve_dtype(self.config.dtype, self.device) or torch.bfloat16

    @property
    def stored_dtype(self) -> str:
        """In which the result is written."""
        return "float32" if self.config.dtype == "float32" else "bfloat16"

    def stored(self) -> Any:
        """A copy of the learner in ``stored_dtype``."""
        return deepcopy(self.learner).to(getattr(torch, self.stored_dtype))

    @property
    def mask_token(self) -> int:
        """The token id that stands for tokens to be drafted in one pass."""
        kinds = ("mask", "unk", "pad", "eos")
        candidates = (getattr(self.tokenizer, f"{kind}_token_id") for kind in kinds)
        return next((token for token in candidates if token is not None), 0)

    def load(self, name: str) -> PreTrainedModel:
        with stage(f"loading {name}"):
            module: PreTrainedModel = load_module(name, self.dtype, self.device, "sdpa")
        return module

    def read_data(self, context: int) -> None:
        """Read the documents, for models that see ``context`` tokens. Needs the tokenizer."""
        config, folder = self.config, self.out / "tokens"
        options = self.tokenizer, config.exclude_licenses, config.loss_on
        streams = [load_token_stream(folder, source, *options) for source in self.sources]
        length = min(config.seq_len, context)
        self.packed_length = max(length, min(config.max_positions, context))
        weights = [source.weight for source in self.sources]
        self.documents = Documents(streams, weights, config.seed, length)

    def compile_if_asked(self, module: Any) -> Any:
        """The module, compiled if the user asked for it. Documents have many lengths, so it is
        compiled once for dynamic shapes. On a CPU this needs a C++ compiler."""
        return torch.compile(module, dynamic=True) if self.compiled else module

    def _read_checkpoint(self) -> dict[str, Any] | None:
        saved = read_state(self.checkpoint)
        if saved is None:
            return None
        old, new = saved["config"], asdict(self.config)
        # Only the number of steps may change when a run is resumed. An option that was added since
        # the run began has its default there.
        old = {key: getattr(type(self.config), key, None) for key in new} | old
        differing = sorted(key for key in new if key != "steps" and old[key] != new[key])
        if differing or saved["kind"] != type(self).__name__:
            what = f"other options ({', '.join(differing)})" if differing else "another kind"
            raise ConfigError(f"{self.out} holds a run with {what}; use another --out or delete it")
        return saved

    def save_checkpoint(self) -> None:
        """Replace checkpoint.pt atomically. Raises WriteError, and then keeps the old one."""
        state = {
            "kind": type(self).__name__,
            "config": asdict(self.config),
            "optimizers": [self.optimizer.state_dict()],  # a list, which earlier versions expect
            "step": self.step,
            "history": self.history,
        }
        write_state(self.checkpoint, state)

    def is_packed_step(self, step: int) -> bool:
        """Whether the documents of a step are packed into long sequences."""
        interval = self.config.long_every
        return interval > 0 and step % interval == interval - 1

    def micro_batches(self, step: int) -> list[Windows]:
        """The batch of a step, divided into parts for one forward each."""
        config, documents = self.config, self.documents
        numbers = documents.batch(step, config.batch_tokens)
        if self.is_packed_step(step):
            return documents.packed_windows(numbers, self.packed_length)
        return documents.windows(numbers, config.micro_tokens)

    def train_step(self) -> float:
        """One optimizer step with gradient accumulation; returns the mean loss."""
        total_loss, parts = 0.0, self.micro_batches(self.step)
        drafts = sum(part.drafts for part in parts)
        for part in parts:
            loss = self.loss(part) * (part.drafts / drafts)
            loss.backward()  # type: ignore[no-untyped-call]
            total_loss += float(loss.detach())
        if not isfinite(total_loss):
            raise ConfigError(
                f"the loss of step {self.step + 1} is {total_loss}, so the weights are lost; use "
                "a lower --lr and --adam-lr with another --out"
            )
        self.optimizer.step(learning_rate_scale(self.step, self.config.steps, self.config.warmup))
        self.step += 1
        return total_loss

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        eval_every: int = 100,
        save_seconds: float = 300.0,
    ) -> Path:
        """Train to the last step, then write the result; returns its folder. Raises ConfigError if
        another process is training in the same folder."""
        with lock_folder(self.out):
            if self.valid_sources and self.step < self.config.steps:
                _ = self.held_out_texts  # unusable ones end the run before it trains
            saved = time.monotonic()
            while self.step < self.config.steps:
                start = time.monotonic()
                loss = self.train_step()
                speed = self.config.batch_tokens / (time.monotonic() - start)
                progress = Progress(self.step, loss, speed)
                if self.step % eval_every == 0 or self.step == self.config.steps:
                    progress.acceptance = self.measure()
                    plain = {name: c.to_dict() for name, c in progress.acceptance.items()}
                    self.history.append({"step": self.step, "loss": loss, "acceptance": plain})
                on_progress(progress)
                if time.monotonic() - saved > save_seconds:
                    self.save_checkpoint()
                    saved = time.monotonic()
            self.save_checkpoint()
            self.write_result()
            return self.folder

    @torch.no_grad()
    def measure(self) -> dict[str, AcceptanceCounts]:
        """The held-out acceptance of greedy drafts of ``draft_length`` tokens, by file."""
        texts = self.held_out_texts if self.valid_sources else []
        counts: dict[str, list[AcceptanceCounts]] = {}
        with stage("measuring held-out acceptance", len(texts), "texts") as progress:
            for text in texts:
                counts.setdefault(text.source, []).append(self.acceptance_of(text))
                progress.advance()
        return {name: total(parts) for name, parts in counts.items()}

    @cached_property
    def held_out_texts(self) -> list[HeldOutText]:
        """Texts of the target, made once, stored in ``out``. Raises DataError if all are empty."""
        sources, cache = self.valid_sources, self.out / "held_out.json"
        texts = load_held_out_texts(self.target, self.tokenizer, sources, self.config, cache)
        if not texts:
            raise DataError(
                "the target's answers to all held-out prompts are empty; give other --valid files"
            )
        return texts


_MAX_LOSS_ROWS = 12


def counts_of(entry: dict[str, Any]) -> dict[str, AcceptanceCounts]:
    """The held-out acceptance in one entry of a history, by file."""
    return msgspec.convert(entry["acceptance"], dict[str, AcceptanceCounts])


def write_card(trainer: Trainer, command: str) -> Path:
    """Write README.md into the folder of a finished run's result; returns its path. ``command`` is
    the user's command line. Data files are named without their folders."""
    config, history = trainer.config, trainer.history
    data = []  # each file with its number of records by licence
    for source in trainer.sources:
        records = Records(source.path, config.exclude_licenses)
        counts = Counter(str(record.get("license", "unknown")) for record in records)
        data.append((source, ", ".join(f"{name} {n:,}" for name, n in counts.most_common())))
    every = max(1, -(-len(history) // _MAX_LOSS_ROWS))
    losses = [(entry, total(counts_of(entry).values())) for entry in history[::-1][::every][::-1]]
    tasks = counts_of(history[-1]) if history else {}
    if tasks:
        tasks["all"] = total(tasks.values())
    tables = {"data": data, "losses": losses, "tasks": tasks}
    template = Path(__file__).with_name("card.md")
    text = render_template(template, trainer=trainer, config=config, command=command, **tables)
    card: Path = trainer.folder / "README.md"
    write_files({card: text.encode("utf-8")}, "the model card")
    return card
