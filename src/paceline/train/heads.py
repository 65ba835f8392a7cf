"""What the training of every kind of head has in common: a frozen target that is looked at.

The target's hidden states and logits are computed batch by batch and used at once; they are
stored only on request (``cache_features``). Batches depend only on (seed, step), so an interrupted
run continues exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.loading import load_module, load_tokenizer, resolve_dtype
from paceline.train.acceptance import AcceptanceCounts, WrittenText, context_of, match_matrix, walk
from paceline.train.configs import HeadConfig
from paceline.train.data import TokenStreams
from paceline.train.documents import Documents, Windows
from paceline.train.documents import Observed as Observed
from paceline.train.optim import MasterOptimizer
from paceline.train.reading import FeatureCache, NativeReader
from paceline.train.trainer import DraftingTrainer, Optimizer
from paceline.train.unrolled import mixed_probs


class HeadTrainer(DraftingTrainer):
    """Trains a head, which lies in ``out/head`` in the end.

    A kind of head says what it reads (``feature_layers``), how it is made, its loss and its drafts.
    """

    config: HeadConfig
    result = noun = "head"
    what = "A head"  # what kind it is, for the model card

    def prepare(self) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.target)
        dtype = resolve_dtype(config.dtype, self.device) or torch.bfloat16
        with stage(f"loading {config.target}"):
            self.target: PreTrainedModel = load_module(config.target, dtype, self.device, "sdpa")
        self.target.requires_grad_(False)
        self.shape = self.target.config.get_text_config(decoder=True)
        self.check_shape()
        kept = TokenStreams(
            self.out / "tokens", self.tokenizer, config.exclude_licenses, config.loss_on
        )
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
        if self.compiled:
            # Documents have many lengths: one compilation for all. CPU needs a C++ compiler.
            self._target_forward = torch.compile(self.target, dynamic=True)
            self._body_forward = torch.compile(self.target.base_model, dynamic=True)
        self.optimizer = self.new_optimizer()
        self._product: bool | None = None
        self._reader = self.reader()
        self._seen: dict[int, Observed] = {}  # held-out texts, by their places
        self._cache = self._feature_cache()

    @property
    def learner(self) -> nn.Module:
        return self.head

    @property
    def drafts_for(self) -> PreTrainedModel:
        return self.target

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
    def target_name(self) -> str:
        """The target without the folders that it lies in."""
        target = self.config.target
        return Path(target).name if Path(target).exists() else target

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return int(self.target.get_output_embeddings().weight.shape[0])

    def _window_rows(self) -> tuple[int, int]:
        """Tokens of the longest piece of a document, and of joined ones."""
        config = self.config
        context = context_of(self.target, config.max_positions)
        short = min(config.seq_len, context)
        return short, max(short, min(config.max_positions, context))

    def reader(self) -> NativeReader | None:
        """What reads in place of the target's module: the kernels, if they run it."""
        if self.device.type != "cpu" or self.compiled or not self._head_is_product():
            return None
        return NativeReader.of(self.target, self.config.target)

    def _feature_cache(self) -> FeatureCache | None:
        if not self.config.cache_features:
            return None
        embedding = self.target.get_input_embeddings()
        return FeatureCache(self.out / "features", self.observe_windows, embedding)

    # -- the loop ------------------------------------------------------------------------------

    def observe_windows(self, windows: Windows) -> Observed:
        """What the target says about the windows."""
        learn = windows.learn.to(self.device)
        return self.observe(windows.ids.to(self.device), learn)

    @torch.no_grad()
    def observe(self, ids: torch.Tensor, learn: torch.Tensor | None = None) -> Observed:
        """Look at windows ``[B, W]`` through the target; ``learn`` as in Observed, None is all.

        Windows padded at the end need no mask: no token sees what comes after it.
        """
        logits = None
        if self._reader is not None:
            *chosen, final = self._reader.read(ids, (*self.feature_layers, self.num_layers))
        else:
            product = self._head_is_product()
            # Without the head: its product of one row a window copies the whole weight.
            forward = self._target_forward if not product else self._body_forward
            out = forward(input_ids=ids, use_cache=False, output_hidden_states=True)
            final, logits = out.hidden_states[-1], None if product else out.logits
            chosen = [out.hidden_states[layer] for layer in self.feature_layers]
        only = len(chosen) == 1 and self.feature_layers[0] == self.num_layers
        features = final if only else torch.cat(chosen, -1)
        learn = torch.ones_like(ids, dtype=torch.bool) if learn is None else learn
        embeds = self.target.get_input_embeddings()(ids)
        return Observed(ids, learn, embeds, features, final, logits)

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

    def _batch(self, step: int) -> list[list[Windows]]:
        """The windows of a step by process, in parts that one forward takes."""
        config, documents = self.config, self.documents
        numbers = documents.batch(step, config.batch_tokens)
        if self.is_long(step):
            joined = documents.joined(numbers, self.long_rows)
            return self.group.share(joined, lambda windows: windows.ids.numel())
        shares = self.group.share(numbers, documents.tokens)
        return [documents.windows(part, config.micro_tokens) for part in shares]

    def losses(self) -> Iterator[torch.Tensor]:
        shares = self._batch(self.step)
        drafts = sum(part.drafts for parts in shares for part in parts)
        for part in shares[self.group.rank]:
            numbered = min(part.numbers) >= 0
            seen = (
                self._cache.look(part) if self._cache and numbered else self.observe_windows(part)
            )
            yield self.loss(seen) * (part.drafts / drafts)

    def seen_of(self, text: WrittenText) -> Observed:
        """What the target says about a held-out text; looked at once."""
        if id(text) not in self._seen:
            seen = self.observe(torch.tensor([text.token_ids], device=self.device))
            # Only the loss needs logits: without them, held-out texts stay small.
            self._seen[id(text)] = replace(seen, logits=None)
        return self._seen[id(text)]

    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        seen = self.seen_of(text)
        drafts = self.drafts(seen, self.config.draft_length)
        return walk(match_matrix(drafts, seen.ids[0], text.prompt))

    def write_result(self) -> Path:
        folder = self.out / self.result
        self.write_head(folder)
        return folder

    def about(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.learnt())
        return (
            f"{self.what} for `{self.target_name}` ({self.num_layers} layers, width "
            f"{self.shape.hidden_size}, vocabulary {self.vocab_size:,}): {parameters:,} parameters "
            f"in {self.config.dtype}, trained by Paceline on that target's hidden states and "
            "probabilities. It drafts for this target only: "
            f"`paceline generate --model TARGET --draft {self.spec}FOLDER`."
        )
