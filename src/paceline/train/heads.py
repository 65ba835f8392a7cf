"""What the training of every kind of head has in common: a frozen target that is looked at.

The target's hidden states and logits are computed batch by batch and used at once; they are
stored only on request (``cache_features``). Batches depend only on (seed, step), so an interrupted
run continues exactly.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError, DataError
from paceline.model.loading import load_module, load_tokenizer, resolve_device, resolve_dtype
from paceline.stages import stage
from paceline.train.acceptance import AcceptanceCounts, match_matrix, total, walk
from paceline.train.data import Source
from paceline.train.documents import Documents, Windows
from paceline.train.feature_cache import FeatureCache
from paceline.train.head_config import HeadConfig
from paceline.train.heldout import WrittenText, written_texts
from paceline.train.lm import learning_rate_scale
from paceline.train.observed import Observed as Observed
from paceline.train.optim import MasterOptimizer
from paceline.train.parallel import Team
from paceline.train.saved_run import previous, read_state, write_state
from paceline.train.token_streams import TokenStreams
from paceline.train.unrolled import mixed_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class Optimizer(Protocol):
    """What a trainer asks of its optimizer; ``MasterOptimizer`` is one."""

    def step(self, scale: float) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class HeadProgress:
    """What the training reports after every step; acceptance (by file) only when measured."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    acceptance: dict[str, AcceptanceCounts] = field(default_factory=dict)


class HeadTrainer(ABC):
    """One resumable run. The folder ``out`` holds checkpoint.pt, token streams and, in the end,
    the head in ``out/head``.

    A kind of head says what it reads (``feature_layers``), how it is made, its loss and its
    drafts. Raises PacelineError, before anything is written, for a target, data or
    options that cannot be used.
    """

    def __init__(
        self, config: HeadConfig, out: Path, device: str = "auto", compiled: bool = False
    ) -> None:
        self.config, self.out, self.compiled = config, out, compiled
        self.team = Team()  # with others: see train/parallel.py
        self.device = resolve_device(device)
        if not 0 <= config.argmax_weight <= 1:
            raise ConfigError("argmax_weight is a share: use a number from 0 to 1")
        self.sources = [Source.parse(spec) for spec in config.data]
        self.valid_sources = [Source.parse(spec) for spec in config.valid]
        saved = self._read_checkpoint()
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(config.target)
        dtype = resolve_dtype(config.dtype, self.device) or torch.bfloat16
        with stage(f"loading {config.target}"):
            self.target: PreTrainedModel = load_module(config.target, dtype, self.device, "sdpa")
        self.target.requires_grad_(False)
        self.shape = self.target.config.get_text_config(decoder=True)
        self.check_shape()
        kept = TokenStreams(out / "tokens", self.tokenizer, config.exclude_licenses, config.loss_on)
        streams = [kept.read(source) for source in self.sources]
        self.rows, self.long_rows = self._window_rows()
        weights = [source.weight for source in self.sources]
        self.documents = Documents(streams, weights, config.seed, self.rows)
        for source, stream in zip(self.sources, streams, strict=True):
            kept.keep(source, stream)
        torch.manual_seed(config.seed)
        self.head = self.new_head().to(self.device, dtype)
        self._target_forward: Callable[..., Any] = self.target
        self._body_forward: Callable[..., Any] = self.target.base_model
        if compiled:
            # Documents have many lengths: one compilation for all. CPU needs a C++ compiler.
            self._target_forward = torch.compile(self.target, dynamic=True)
            self._body_forward = torch.compile(self.target.base_model, dynamic=True)
        self.optimizer = self.new_optimizer()
        self.step = 0
        self.history: list[dict[str, Any]] = []
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.history = saved["step"], saved["history"]
        self._product: bool | None = None
        self._held_out: list[tuple[WrittenText, Observed]] | None = None
        self._cache = self._feature_cache()

    # -- what a kind of head says --------------------------------------------------------------

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs are read; num_layers is the final norm's output."""

    @abstractmethod
    def new_head(self) -> nn.Module:
        """A head with its first weights."""

    @abstractmethod
    def loss(self, seen: Observed) -> torch.Tensor:
        """Mean loss over the places that drafts start from."""

    @abstractmethod
    def drafts(self, seen: Observed, length: int) -> torch.Tensor:
        """For one text (B = 1): int64 ``[W, length]``, target ids of greedy drafts.

        Row t drafts from the features up to t and the text's token t + 1; column j is about
        token t + 2 + j, the text's own tokens standing in for the draft's earlier ones.
        """

    @abstractmethod
    def write_head(self, folder: Path) -> None:
        """Write configuration and weights of the head in their public layout."""

    def check_shape(self) -> None:
        """Raise ConfigError if the options do not fit the target; before data is read."""
        wrong = [n for n in self.feature_layers if not 0 <= n <= self.num_layers]
        if wrong:
            raise ConfigError(
                f"feature layers {wrong} do not exist: the target has layers 0 to "
                f"{self.num_layers - 1}, and {self.num_layers} means the final norm's output"
            )

    @property
    def measured_drafts(self) -> str:
        """What held-out acceptance is measured with, for the model card."""
        return f"drafts of {self.config.draft_length} tokens"

    def new_optimizer(self) -> Optimizer:
        """What steps the head; and the target, if it learns too."""
        config = self.config
        return MasterOptimizer(self.head, config.lr, config.adam_lr, config.weight_decay)

    # -- set-up --------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return int(self.shape.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return int(self.target.get_output_embeddings().weight.shape[0])

    def _window_rows(self) -> tuple[int, int]:
        """Tokens of the longest piece of a document, and of joined ones."""
        config = self.config
        context = int(getattr(self.shape, "max_position_embeddings", config.max_positions))
        short = min(config.seq_len, context)
        return short, max(short, min(config.max_positions, context))

    def _feature_cache(self) -> FeatureCache | None:
        if not self.config.cache_features:
            return None
        embedding = self.target.get_input_embeddings()
        return FeatureCache(self.out / "features", self.look_at, embedding)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def _read_checkpoint(self) -> dict[str, Any] | None:
        saved, self.note = read_state(self.checkpoint)
        if saved is None:
            return None
        kind, before, own = saved.get("kind"), saved["config"], asdict(self.config)
        # The length of the schedule may change on resumption; anything else would be another run.
        differing = [key for key in own if key != "steps" and before.get(key) != own[key]]
        if kind != type(self).__name__ or differing:
            what = f"other options ({', '.join(differing)})" if differing else "another kind"
            raise ConfigError(f"{self.out} holds a run with {what}; use another --out or delete it")
        return saved

    def save_checkpoint(self) -> None:
        """Replace checkpoint.pt as a whole. Raises WriteError; the former one then stands."""
        state = {
            "kind": type(self).__name__,
            "config": asdict(self.config),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "history": self.history,
        }
        write_state(self.checkpoint, state)

    # -- the loop ------------------------------------------------------------------------------

    def look_at(self, windows: Windows) -> Observed:
        """What the target says about the windows."""
        learn = windows.learn.to(self.device)
        return self.observe(windows.ids.to(self.device), learn)

    @torch.no_grad()
    def observe(self, ids: torch.Tensor, learn: torch.Tensor | None = None) -> Observed:
        """Look at windows ``[B, W]`` through the target; ``learn`` as in Observed, None is all.

        Windows padded at the end need no mask: no token sees what comes after it.
        """
        product = self._head_is_product()
        # Without the head: its product of even one row for each window copies the whole weight.
        forward = self._target_forward if not product else self._body_forward
        out = forward(input_ids=ids, use_cache=False, output_hidden_states=True)
        final = out.hidden_states[-1]
        chosen = [out.hidden_states[layer] for layer in self.feature_layers]
        features = final if len(chosen) == 1 and chosen[0] is final else torch.cat(chosen, -1)
        learn = torch.ones_like(ids, dtype=torch.bool) if learn is None else learn
        embeds = self.target.get_input_embeddings()(ids)
        return Observed(ids, learn, embeds, features, final, None if product else out.logits)

    @torch.no_grad()
    def _head_is_product(self) -> bool:
        """Whether the target's logits are its head's product with the last hidden states and
        nothing more (no cap, no scale), so that they can be made for single rows and tokens."""
        if self._product is None:
            ids = torch.arange(8, device=self.device)[None] % self.vocab_size
            try:
                out = self.target(
                    input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1
                )
            except TypeError:  # a target that always makes all of them
                self._product = False
                return False
            again = self.target.get_output_embeddings()(out.hidden_states[-1][:, -1:]).float()
            wanted = out.logits.float()
            scale = float(wanted.abs().max())
            same = again.shape == wanted.shape
            self._product = same and torch.allclose(again, wanted, rtol=0.02, atol=0.02 * scale)
        return self._product

    def target_probs(
        self, seen: Observed, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the target says where the next token is to be learnt, over the tokens ``ids`` or
        all of them, ``argmax_weight`` of it moved to the likeliest one.

        Distributions ``[M, len(ids)]`` of these M places, and int64 ``[B * W]``, which of them a
        place of the windows has (0 where none).
        """
        flat = F.pad(seen.learn[:, 1:], (0, 1)).flatten().nonzero()[:, 0]
        row_of = torch.zeros(seen.ids.numel(), dtype=torch.long, device=flat.device)
        row_of[flat] = torch.arange(len(flat), device=flat.device)
        head = self.target.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        source = seen.final if seen.logits is None else seen.logits.detach()

        def logits_of(rows: slice) -> torch.Tensor:
            part = source.flatten(0, 1)[flat[rows]]
            if seen.logits is None:
                return F.linear(part, weight, bias)
            return part if ids is None else part[:, ids]

        return mixed_probs(len(flat), logits_of, self.config.argmax_weight), row_of

    def learnt(self) -> list[nn.Parameter]:
        """What the processes of a team add up the gradients of."""
        return list(self.head.parameters())

    @property
    def alone(self) -> str:
        """Why only one process can train it; empty if several can."""
        return ""

    def _batch(self, step: int) -> list[list[Windows]]:
        """The windows of a step by process, in parts that one forward takes."""
        config, documents = self.config, self.documents
        numbers = documents.batch(step, config.batch_tokens)
        if config.long_every > 0 and step % config.long_every == config.long_every - 1:
            joined = documents.joined(numbers, self.long_rows)
            return self.team.share(joined, lambda windows: windows.ids.numel())
        shares = self.team.share(numbers, documents.tokens)
        return [documents.windows(own, config.micro_tokens) for own in shares]

    def train_step(self) -> float:
        """One optimizer step; returns the mean loss."""
        shares = self._batch(self.step)
        drafts = sum(part.drafts for parts in shares for part in parts)
        loss_sum = 0.0
        for part in shares[self.team.rank]:
            numbered = min(part.numbers) >= 0
            seen = self._cache.look(part) if self._cache and numbered else self.look_at(part)
            loss = self.loss(seen) * (part.drafts / drafts)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
        loss_sum = self.team.add_up(self.learnt(), loss_sum)
        self.optimizer.step(learning_rate_scale(self.step, self.config.steps, self.config.warmup))
        self.step += 1
        return loss_sum

    @torch.no_grad()
    def measure(self) -> dict[str, AcceptanceCounts]:
        """Held-out acceptance by validation file: greedy chains of ``draft_length`` tokens."""
        if self._held_out is None:
            self._held_out = self._read_held_out()
        found: dict[str, list[AcceptanceCounts]] = {}
        with stage("measuring held-out acceptance", len(self._held_out), "texts") as doing:
            for text, seen in self._held_out:
                drafts = self.drafts(seen, self.config.draft_length)
                matches = match_matrix(drafts, seen.ids[0], text.prompt)
                found.setdefault(text.source, []).append(walk(matches))
                doing.advance()
        return {name: total(parts) for name, parts in found.items()}

    def _read_held_out(self) -> list[tuple[WrittenText, Observed]]:
        config = self.config
        if not self.valid_sources:
            return []
        texts = written_texts(
            self.target,
            self.tokenizer,
            self.valid_sources,
            config.held_out,
            config.held_out_tokens,
            config.exclude_licenses,
            self.out / "held_out.json",
        )
        if not texts:
            raise DataError("the target ends every held-out text at once; give other --valid files")
        seen = []
        for text in texts:
            ids = torch.tensor([text.token_ids], device=self.device)
            # Only the loss needs logits: without them, held-out texts stay small.
            seen.append((text, replace(self.observe(ids), logits=None)))
        return seen

    def run(
        self,
        on_progress: Callable[[HeadProgress], None] = lambda progress: None,
        eval_every: int = 100,
        save_seconds: float = 300.0,
    ) -> Path:
        """Train to the last step, then write the head; returns its folder."""
        saved = time.monotonic()
        while self.step < self.config.steps:
            start = time.monotonic()
            loss = self.train_step()
            speed = self.config.batch_tokens / (time.monotonic() - start)
            progress = HeadProgress(self.step, self.config.steps, loss, speed)
            if self.step % eval_every == 0 or self.step == self.config.steps:
                progress.acceptance = self.measure()
                acceptance = {name: a.to_dict() for name, a in progress.acceptance.items()}
                self.history.append({"step": self.step, "loss": loss, "acceptance": acceptance})
            on_progress(progress)
            if time.monotonic() - saved > save_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
        self.save_checkpoint()
        folder = self.out / "head"
        self.write_head(folder)
        previous(self.checkpoint).unlink(missing_ok=True)
        return folder
