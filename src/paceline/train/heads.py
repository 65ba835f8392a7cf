"""What the training of every kind of head has in common: a frozen target.

Its hidden states and logits are used at once, and stored only on request (``cache_features``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.core.stages import stage
from paceline.model.loading import load_module, load_tokenizer, resolve_dtype
from paceline.train.acceptance import (
    AcceptanceCounts,
    WrittenText,
    context_of,
    drafting_rows,
    ranks_of,
    walk,
)
from paceline.train.configs import HeadConfig
from paceline.train.data import Windows
from paceline.train.losses import mixed_probs
from paceline.train.reading import FeatureCache, NativeReader, Observed
from paceline.train.trainer import Trainer, run_name
from paceline.train.unrolled import DraftStarts

# Not cuDNN's, which plans again for every length: a third of a step's time on an H200.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class HeadTrainer(Trainer):
    """Trains a head, which lies in ``out/head`` in the end."""

    config: HeadConfig
    result = noun = "head"
    what = "A head"  # what kind it is, for the model card

    def prepare(self) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        dtype = resolve_dtype(config.dtype, self.device) or torch.bfloat16
        with stage(f"loading {config.model}"):
            self.target = load_module(config.model, dtype, self.device, "sdpa")
        self.drafts_for = self.target
        self.target.requires_grad_(False)
        self.shape = self.target.config.get_text_config(decoder=True)
        self.head_shape = self.head_config()  # before data is read
        self.read_data(context_of(self.target, config.max_positions))
        torch.manual_seed(config.seed)
        self.learner = self.head = self.new_head().to(self.device, dtype)
        self._head_is_product = self._is_product()
        # Without the head: its product of one row a window copies the whole weight.
        forward = self.target.base_model if self._head_is_product else self.target
        self._forward = self.compiled_form(forward)
        self._reader: NativeReader | None = None
        if self.device.type == "cpu" and not self.compiled and self._head_is_product:
            self._reader = NativeReader.of(self.target, config.model)
        self._seen: dict[int, Observed] = {}  # held-out texts, by their ids
        self._cache: FeatureCache | None = None
        if config.cache_features:
            where = self.out / "features", self.observe_windows, self.device
            read = f"{config.model} {self.feature_layers}"
            self._cache = FeatureCache(*where, self.shape.hidden_size, read)

    # -- what a kind of head says --------------------------------------------------------------

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs are read; num_layers is the final norm's output."""

    @abstractmethod
    def head_config(self) -> Any:
        """The head's shape, where not given the target's. Raises ConfigError if the options do not
        fit the target."""

    @abstractmethod
    def new_head(self) -> nn.Module:
        """A head of ``head_shape`` with its first weights."""

    @abstractmethod
    def loss_of(self, seen: Observed) -> torch.Tensor:
        """Mean loss over the positions that drafts start from."""

    @abstractmethod
    def levels(self, seen: Observed, starts: DraftStarts, length: int) -> Iterator[torch.Tensor]:
        """Greedy drafts of at most ``length`` tokens, level by level: of each of N starts a target
        id, int64 ``[N]``."""

    @abstractmethod
    def write_head(self, folder: Path) -> None:
        """Write configuration and weights of the head in their public layout."""

    def layer_config(self, ffn_size: int, heads: int = 0) -> dict[str, Any]:
        """Of a head that is a decoder layer: what its configuration shares with the target's. 0 is
        the target's, too; with ``heads`` there are as many of keys and values."""
        shape, rope = self.shape, getattr(self.shape, "rope_parameters", None) or {}
        kv_heads = heads or getattr(shape, "num_key_value_heads", None)
        heads = heads or shape.num_attention_heads
        return {
            "hidden_size": shape.hidden_size,
            "heads": heads,
            "kv_heads": kv_heads or heads,
            "head_dim": getattr(shape, "head_dim", None) or shape.hidden_size // heads,
            "ffn_size": ffn_size or getattr(shape, "intermediate_size", 4 * shape.hidden_size),
            "vocab_size": self.vocab_size,
            "target_layers": self.num_layers,
            "feature_layers": self.feature_layers,
            "max_positions": getattr(shape, "max_position_embeddings", self.config.max_positions),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": getattr(shape, "rms_norm_eps", 1e-6),
        }

    # -- the target ----------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return int(self.shape.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return int(self.target.get_output_embeddings().weight.shape[0])

    def observe_windows(self, windows: Windows) -> Observed:
        """What the target says about the windows."""
        ids, learn = windows.ids.to(self.device), windows.learn.to(self.device)
        return self.observe(ids, learn, windows.lengths)

    @torch.no_grad()
    def observe(
        self, ids: torch.Tensor, learn: torch.Tensor | None = None, lengths: Sequence[int] = ()
    ) -> Observed:
        """Of windows ``[B, W]``, padded at the end to all but ``lengths``, if given; ``learn`` as
        in Observed, None is all."""
        logits = None
        if self._reader is not None:
            layers = (*self.feature_layers, self.num_layers)
            *chosen, final = self._reader.read(ids, lengths or ids.shape[1:] * len(ids), layers)
        else:
            with sdpa_kernel(_ATTENTION):
                out = self._forward(input_ids=ids, use_cache=False, output_hidden_states=True)
            final, logits = out.hidden_states[-1], getattr(out, "logits", None)
            chosen = [out.hidden_states[layer] for layer in self.feature_layers]
        only = len(chosen) == 1 and self.feature_layers[0] == self.num_layers
        features = final if only else torch.cat(chosen, -1)
        learn = torch.ones_like(ids, dtype=torch.bool) if learn is None else learn
        return Observed(ids, learn, features, final, logits)

    def _is_product(self) -> bool:
        """Whether the target's logits are its head's product with the last hidden states and
        nothing more (no cap, no scale), so that they can be made for single rows and tokens."""
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            out = self.target(input_ids=ids, use_cache=False, output_hidden_states=True)
            product = self.target.get_output_embeddings()(out.hidden_states[-1]).float()
        logits = out.logits.float()
        near = 0.02 * float(logits.abs().max())
        return product.shape == logits.shape and torch.allclose(product, logits, 0.02, near)

    @torch.no_grad()
    def target_probs(
        self, seen: Observed, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distributions ``[M, len(ids)]`` of the M positions whose next token is to be learnt, over
        the tokens ``ids`` or all, ``argmax_weight`` of it moved to the likeliest one; and int64
        ``[B * W]``, which of them a position of the windows has (0 where none)."""
        flat = F.pad(seen.learn[:, 1:], (0, 1)).flatten().nonzero()[:, 0]
        row_of = torch.zeros(seen.ids.numel(), dtype=torch.long, device=flat.device)
        row_of[flat] = torch.arange(len(flat), device=flat.device)
        head = self.target.get_output_embeddings()
        chosen = slice(None) if ids is None else ids
        weight, bias = head.weight[chosen], None if head.bias is None else head.bias[chosen]
        source = (seen.final if seen.logits is None else seen.logits).flatten(0, 1)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            if seen.logits is None:
                return F.linear(source[rows], weight, bias)
            return source[rows][:, chosen]

        return mixed_probs(flat, logits_of, self.config.argmax_weight), row_of

    # -- the loop ------------------------------------------------------------------------------

    def loss(self, windows: Windows) -> torch.Tensor:
        kept = None if self.is_long(self.step) else self._cache  # joined ones do not come again
        return self.loss_of(self.observe_windows(windows) if kept is None else kept.look(windows))

    def seen_of(self, text: WrittenText) -> Observed:
        """What the target says about a held-out text; looked at once."""
        if id(text) not in self._seen:
            seen = self.observe(torch.tensor([text.token_ids], device=self.device))
            # Only the loss needs logits: without them, held-out texts stay small.
            self._seen[id(text)] = replace(seen, logits=None)
        return self._seen[id(text)]

    def drafts(self, seen: Observed, length: int) -> torch.Tensor:
        """For one text (B = 1): int64 ``[W, length]``, target ids of greedy drafts, -1 for none.
        Row t drafts from the features up to t and token t + 1; column j is about token t + 2 + j.
        What a draft says beyond the text's end is never compared."""
        starts = DraftStarts.of(torch.ones_like(seen.learn))
        levels = torch.stack([*self.levels(seen, starts, length)], 1)
        drafted = levels.new_full((seen.ids.shape[1], levels.shape[1]), -1)
        drafted[starts.flat] = levels
        return drafted

    def acceptance_of(self, text: WrittenText) -> AcceptanceCounts:
        seen = self.seen_of(text)
        rows = drafting_rows(seen.ids[0], text.prompt)
        drafts = self.drafts(seen, self.config.draft_length)[rows]
        return walk(ranks_of(drafts[..., None], seen.ids[0], rows) == 0)

    def write_result(self) -> Path:
        folder = self.out / self.result
        self.write_head(folder)
        return folder

    def about(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.head.parameters())
        return (
            f"{self.what} for `{run_name(self.config.model)}` ({self.num_layers} layers, width "
            f"{self.shape.hidden_size}, vocabulary {self.vocab_size:,}): {parameters:,} parameters "
            f"in {self.config.dtype}, trained by Paceline on that target's hidden states and "
            "probabilities. It drafts for this target only: "
            f"`paceline generate --model TARGET --draft {self.spec}FOLDER`."
        )
