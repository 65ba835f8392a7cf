"""The loop of every training, and its optimizer. Batches depend only on (seed, step), so an
interrupted run continues exactly."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.core.stages import stage
from paceline.errors import ConfigError, DataError
from paceline.files import check_writable
from paceline.model.loading import resolve_device, weight_files
from paceline.model.tensorfile import add_checksums
from paceline.train.acceptance import AcceptanceCounts, WrittenText, total, written_texts
from paceline.train.checkpoint import alone_in, previous, read_state, write_state
from paceline.train.configs import TrainConfig
from paceline.train.data import Documents, Windows, token_stream
from paceline.train.records import Source

_MAX_NORM = 1.0  # of all gradients together


class MasterOptimizer:
    """Keeps float32 master copies, steps them, and writes them back rounded: bf16 weights lose
    updates smaller than 1/256 of a weight.

    Hidden matrices take Muon (Jordan et al. 2024: momentum orthogonalised by Newton-Schulz), the
    rest AdamW, with matrices whose name contains one of ``outer``.
    """

    def __init__(
        self, model: nn.Module, lr: float, adam_lr: float, weight_decay: float, outer: Sequence[str]
    ) -> None:
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().float().clone())
            self._pairs.append((parameter, master))
            is_hidden = parameter.ndim == 2 and not any(part in name for part in outer)
            (hidden if is_hidden else rest).append(master)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if hidden:
            muon = torch.optim.Muon(
                hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._optimizers.append((muon, lr))
        if rest:
            adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
            self._optimizers.append((adam, adam_lr))

    def step(self, scale: float) -> None:
        """Apply the gradients at ``scale`` times the peak rates."""
        for parameter, master in self._pairs:
            # None: it is frozen.
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_([master for _, master in self._pairs], _MAX_NORM)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": [master.detach() for _, master in self._pairs],
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for (parameter, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)
                parameter.copy_(master)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model and its tokenizer as transformers does; the weights get checksums."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in weight_files(folder):
        add_checksums(file)


def learning_rate_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then linear decay to zero at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def run_name(model: str) -> str:
    """A model without its folders: ``runs/target/model`` is "target"; other names as they are."""
    path = Path(model)
    if not path.exists():
        return model
    return path.parent.name if path.name == "model" else path.name


@dataclass
class Progress:
    """After a step; ``acceptance``, by validation file, only when measured."""

    step: int
    loss: float
    tokens_per_second: float
    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """What the history of a run keeps of it: plain values."""
        acceptance = {name: counts.to_dict() for name, counts in self.acceptance.items()}
        return {"step": self.step, "loss": self.loss, "acceptance": acceptance}


class Trainer(ABC):
    """One resumable run of what drafts for a target. The folder ``out`` holds checkpoint.pt, token
    streams and the result. It is measured on texts that the target wrote.

    Raises PacelineError, before anything but token streams is written, for models, data or options
    that cannot be used.
    """

    result = "model"  # where the result goes, below ``out``
    noun = "model"  # what it is
    spec: str | None = ""  # what stands before its folder in ``--draft``; None: it is no draft

    # ``prepare`` makes these.
    learner: nn.Module  # what is trained, and written in the end
    tokenizer: PreTrainedTokenizerFast
    drafts_for: PreTrainedModel  # the target

    def __init__(
        self, config: TrainConfig, out: Path, device: str = "auto", compiled: bool = False
    ) -> None:
        self.config, self.out, self.compiled = config, out, compiled
        self.checkpoint = out / "checkpoint.pt"
        self.check()
        self.device = resolve_device(device)
        self.sources = [Source.parse(spec) for spec in config.data]
        self.valid_sources = [Source.parse(spec) for spec in config.valid]
        self.step = 0
        self.history: list[dict[str, Any]] = []
        saved = self._read_checkpoint()
        check_writable(self.out / self.result, f"the {self.noun}")  # before the hours of training
        self.prepare()
        rates = config.lr, config.adam_lr, config.weight_decay
        self.optimizer = MasterOptimizer(self.learner, *rates, self.outer)
        if saved is not None:
            self.optimizer.load_state_dict(*saved["optimizers"])
            self.step, self.history = saved["step"], saved["history"]

    # -- what a kind of training says --------------------------------------------------------------

    def check(self) -> None:  # noqa: B027
        """Raise ConfigError for options that do not fit together; before anything is read."""

    @abstractmethod
    def prepare(self) -> None:
        """Load and make everything but optimizers."""

    @abstractmethod
    def loss(self, windows: Windows) -> torch.Tensor:
        """Mean loss of some windows, which one forward takes."""

    @abstractmethod
    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        """What the target would take of drafts for one of its texts."""

    @abstractmethod
    def write_result(self) -> Path:
        """Write what was trained, all at once; returns its folder. Raises WriteError."""

    @abstractmethod
    def about(self) -> str:
        """What was made from what, for the model card."""

    @property
    def outer(self) -> Sequence[str]:
        """Parts of the names of matrices that AdamW steps, as those of embeddings and heads."""
        return ("embed", "lm_head", "mask_hidden")

    @property
    def mask_token(self) -> int:
        """The token of rows that stand for what is to be drafted in one pass."""
        kinds = ("mask", "unk", "pad", "eos")
        known = (getattr(self.tokenizer, f"{kind}_token_id") for kind in kinds)
        return next((token for token in known if token is not None), 0)

    def read_data(self, context: int) -> None:
        """Read the documents to learn from, for models that take ``context`` tokens; needs the
        tokenizer."""
        config, folder = self.config, self.out / "tokens"
        given = self.tokenizer, config.exclude_licenses, config.loss_on
        streams = [token_stream(folder, source, *given) for source in self.sources]
        rows = min(config.seq_len, context)  # tokens of a piece of a document
        self.long_rows = max(rows, min(config.max_positions, context))  # and of joined ones
        weights = [source.weight for source in self.sources]
        self.documents = Documents(streams, weights, config.seed, rows)

    def compiled_form(self, module: Any) -> Any:
        """A module as it runs. Documents have many lengths: one compilation for all, which takes a
        C++ compiler on a processor."""
        return torch.compile(module, dynamic=True) if self.compiled else module

    # -- checkpoints -------------------------------------------------------------------------------

    def _read_checkpoint(self) -> dict[str, Any] | None:
        saved, self.note = read_state(self.checkpoint)
        if saved is None:
            return None
        before, present = saved["config"], asdict(self.config)
        # The length of the schedule may change on resumption; anything else would be another run.
        differing = sorted(
            key for key in present if key != "steps" and before.get(key) != present[key]
        )
        if differing or saved["kind"] != type(self).__name__:
            what = f"other options ({', '.join(differing)})" if differing else "another kind"
            raise ConfigError(f"{self.out} holds a run with {what}; use another --out or delete it")
        return saved

    def save_checkpoint(self) -> None:
        """Replace checkpoint.pt as a whole. Raises WriteError; the former one then stands."""
        state = {
            "kind": type(self).__name__,
            "config": asdict(self.config),
            "optimizers": [self.optimizer.state_dict()],  # a list, as earlier versions read it
            "step": self.step,
            "history": self.history,
        }
        write_state(self.checkpoint, state)

    # -- the loop ----------------------------------------------------------------------------------

    def is_long(self, step: int) -> bool:
        """Whether a step has long windows."""
        every = self.config.long_every
        return every > 0 and step % every == every - 1

    def parts(self, step: int) -> list[Windows]:
        """The windows of a step, in parts that one forward takes."""
        config, documents = self.config, self.documents
        numbers = documents.batch(step, config.batch_tokens)
        if self.is_long(step):
            return documents.joined(numbers, self.long_rows)
        return documents.windows(numbers, config.micro_tokens)

    def train_step(self) -> float:
        """One optimizer step; returns the mean loss over what is to be learnt."""
        total_loss, parts = 0.0, self.parts(self.step)
        drafts = sum(part.drafts for part in parts)
        for part in parts:
            loss = self.loss(part) * (part.drafts / drafts)
            loss.backward()  # type: ignore[no-untyped-call]
            total_loss += float(loss.detach())
        self.optimizer.step(learning_rate_scale(self.step, self.config.steps, self.config.warmup))
        self.step += 1
        return total_loss

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        eval_every: int = 100,
        save_seconds: float = 300.0,
    ) -> Path:
        """Train to the last step, then write the result; returns its folder. Raises ConfigError
        while another process trains in the same folder."""
        with alone_in(self.out):
            saved = time.monotonic()
            while self.step < self.config.steps:
                start = time.monotonic()
                loss = self.train_step()
                speed = self.config.batch_tokens / (time.monotonic() - start)
                progress = Progress(self.step, loss, speed)
                if self.step % eval_every == 0 or self.step == self.config.steps:
                    progress.acceptance = self.measure()
                    self.history.append(progress.entry)
                on_progress(progress)
                if time.monotonic() - saved > save_seconds:
                    self.save_checkpoint()
                    saved = time.monotonic()
            self.save_checkpoint()
            folder = self.write_result()
            previous(self.checkpoint).unlink(missing_ok=True)
            return folder

    # -- held-out acceptance -----------------------------------------------------------------------

    @torch.no_grad()
    def measure(self) -> dict[str, AcceptanceCounts]:
        """Held-out acceptance by validation file: greedy drafts of ``draft_length`` tokens."""
        texts = self.held_out_texts if self.valid_sources else []
        counts: dict[str, list[AcceptanceCounts]] = {}
        with stage("measuring held-out acceptance", len(texts), "texts") as doing:
            for text in texts:
                counts.setdefault(text.source, []).append(self.acceptance_of(text))
                doing.advance()
        return {name: total(parts) for name, parts in counts.items()}

    @cached_property
    def held_out_texts(self) -> list[WrittenText]:
        """Written by the target once and kept in ``out``. Raises DataError if none has a word."""
        config = self.config
        asked = self.drafts_for, self.tokenizer, self.valid_sources, config.held_out
        longest, excluded = config.held_out_tokens, config.exclude_licenses
        texts = written_texts(*asked, longest, excluded, self.out / "held_out.json")
        if not texts:
            raise DataError("the target ends every held-out text at once; give other --valid files")
        return texts
