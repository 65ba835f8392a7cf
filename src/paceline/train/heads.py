"""The base of all trainers of heads: runs the frozen target, whose features and logits are stored
only on request (``cache_features``), and measures held-out acceptance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.errors import ConfigError
from paceline.model.loading import load_tokenizer
from paceline.model.names import model_path, stamps_of
from paceline.train import acceptance
from paceline.train.acceptance import AcceptanceCounts, HeldOutText
from paceline.train.configs import HeadConfig, LayersConfig
from paceline.train.data import Windows
from paceline.train.losses import teacher_probs
from paceline.train.reading import FeatureCache, NativeReader, TargetOutputs
from paceline.train.trainer import Trainer, run_name
from paceline.train.unrolled import DraftStarts

# Without cuDNN's attention, which builds a plan for every new length: a third of a step's time on
# an H200.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class HeadTrainer(Trainer):
    """Trains a head; the result is in ``out/head``."""

    config: HeadConfig
    result = noun = "head"
    what = "A head"  # the kind of head, for the model card

    def prepare(self) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        self.target = self.load(config.model).requires_grad_(False)
        self.shape = self.target.config.get_text_config(decoder=True)
        self.lm_head: nn.Linear = self.target.get_output_embeddings()
        self.num_layers = int(self.shape.num_hidden_layers)
        self.vocab_size = int(self.lm_head.weight.shape[0])  # width of the target's logits
        self.head_shape = self.head_config()  # fails before data is read
        self.read_data(acceptance.max_context(self.target, config.max_positions))
        torch.manual_seed(config.seed)
        self.learner = self.head = self.new_head().to(self.device, self.dtype)
        is_product = self._is_product()
        if config.cache_features and not is_product:
            raise ConfigError(
                f"{config.model} caps or scales its logits, so they cannot be computed from cached "
                "outputs; leave out --cache-features"
            )
        # Run the target without its lm_head where possible: its product of one row per window
        # would copy the whole weight.
        self._forward = self.compile_if_asked(self.target.base_model if is_product else self.target)
        self._reader: NativeReader | None = None
        if self.device.type == "cpu" and not self.compiled and is_product:
            self._reader = NativeReader.of(self.target, config.model)
        self._held_out_outputs: dict[int, TargetOutputs] = {}  # by id(text)
        self._cache: FeatureCache | None = None
        if config.cache_features:
            location = self.out / "features", self.run_target, self.device
            origin = f"{stamps_of(model_path(config.model))} {self.feature_layers}"
            self._cache = FeatureCache(*location, self.shape.hidden_size, origin, self.dtype)

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose inputs are the features; ``num_layers``: the final norm's output."""

    @abstractmethod
    def head_config(self) -> Any:
        """The configuration of the head; sizes that are not given are those of the target. Raises
        ConfigError if the options do not fit the target."""

    @abstractmethod
    def new_head(self) -> nn.Module:
        """A head of ``head_shape`` with its initial weights."""

    @abstractmethod
    def step_losses(self, target_out: TargetOutputs) -> Iterator[torch.Tensor]:
        """For each draft position the mean loss over the positions that drafts start from."""

    @abstractmethod
    def levels(self, target_out: TargetOutputs, starts: DraftStarts) -> Iterator[torch.Tensor]:
        """Greedy drafts, perhaps without end. Yields for each draft position the token ids (of the
        target's vocabulary) of the N starts, int64 ``[N]``."""

    def layer_config(self, config: LayersConfig) -> dict[str, Any]:
        """The configuration that a head of decoder layers shares with the target. Sizes of 0 are
        the target's; with ``heads`` there are as many key and value heads."""
        shape, rope = self.shape, getattr(self.shape, "rope_parameters", None) or {}
        heads = config.heads or shape.num_attention_heads
        kv_heads = config.heads or getattr(shape, "num_key_value_heads", None) or heads
        width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        ffn_size = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
        return {
            "layers": config.layers,
            "hidden_size": shape.hidden_size,
            "heads": heads,
            "kv_heads": config.kv_heads or kv_heads,
            "head_dim": config.head_dim or width,
            "ffn_size": config.ffn_size or ffn_size,
            "vocab_size": self.vocab_size,
            "target_layers": self.num_layers,
            "feature_layers": self.feature_layers,
            "max_positions": getattr(shape, "max_position_embeddings", self.config.max_positions),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": getattr(shape, "rms_norm_eps", 1e-6),
        }

    @torch.no_grad()
    def run_target(
        self, ids: torch.Tensor, loss_mask: torch.Tensor | None = None, lengths: Sequence[int] = ()
    ) -> TargetOutputs:
        """Run the target on token ids ``[B, W]``, padded at the end if ``lengths`` are given.
        Without ``loss_mask`` all tokens are trained on."""
        ids, logits = ids.to(self.device), None
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
        loss_mask = torch.ones_like(ids, dtype=torch.bool) if loss_mask is None else loss_mask
        return TargetOutputs(ids, loss_mask.to(self.device), features, final, logits)

    def _is_product(self) -> bool:
        """Whether the target's logits are just the product of its lm_head with the final hidden
        states (no cap, no scale), so that they can be computed for some rows and tokens only."""
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            out = self.target(input_ids=ids, use_cache=False, output_hidden_states=True)
            product = self.lm_head(out.hidden_states[-1]).float()
        logits = out.logits.float()
        tolerance = 0.02 * float(logits.abs().max())
        return product.shape == logits.shape and torch.allclose(product, logits, 0.02, tolerance)

    @torch.no_grad()
    def target_probs(
        self, target_out: TargetOutputs, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's distributions ``[M, len(ids)]`` at the M positions whose next token is in
        the loss mask, over the tokens ``ids`` (None: all), with a share ``argmax_weight`` moved to
        the likeliest token; and int64 ``[B * W]``, the row of each position (0 if it has none)."""
        flat = F.pad(target_out.loss_mask[:, 1:], (0, 1)).flatten().nonzero()[:, 0]
        row_of = torch.zeros(target_out.ids.numel(), dtype=torch.long, device=flat.device)
        row_of[flat] = torch.arange(len(flat), device=flat.device)
        head, chosen = self.lm_head, slice(None) if ids is None else ids
        weight, bias = head.weight[chosen], None if head.bias is None else head.bias[chosen]
        source = target_out.final if target_out.logits is None else target_out.logits
        source = source.flatten(0, 1)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            if target_out.logits is None:
                return F.linear(source[rows], weight, bias)
            return source[rows][:, chosen]

        return teacher_probs(flat, logits_of, self.config.argmax_weight), row_of

    def loss(self, windows: Windows) -> torch.Tensor:
        # Packed sequences are not cached, as they do not occur again.
        if self._cache is None or self.is_packed_step(self.step):
            return self.loss_of(self.run_target(*windows))
        return self.loss_of(self._cache.get(windows))

    def loss_of(self, target_out: TargetOutputs) -> torch.Tensor:
        """The mean of ``step_losses``, in which each counts ``step_decay`` times the one before."""
        losses = torch.stack([*self.step_losses(target_out)])
        weights = self.config.step_decay ** torch.arange(len(losses), device=losses.device)
        return (weights * losses).sum() / weights.sum()

    def outputs_for_text(self, text: HeldOutText) -> TargetOutputs:
        """The target's outputs for a held-out text, which are computed once."""
        if id(text) not in self._held_out_outputs:
            target_out = self.run_target(torch.tensor([text.token_ids]))
            # Only the loss needs logits; without them a held-out text takes little memory.
            self._held_out_outputs[id(text)] = replace(target_out, logits=None)
        return self._held_out_outputs[id(text)]

    def drafts(self, target_out: TargetOutputs, length: int) -> torch.Tensor:
        """The greedy drafts at all positions of one text (B = 1): int64 ``[W, length]``, -1 where
        there is no draft. Row t is drafted from the features up to t and token t + 1; its column j
        is a draft of token t + 2 + j, which may be beyond the end of the text."""
        starts = DraftStarts.of(torch.ones_like(target_out.loss_mask))
        levels = torch.stack([*islice(self.levels(target_out, starts), length)], 1)
        drafted = levels.new_full((target_out.ids.shape[1], levels.shape[1]), -1)
        drafted[starts.flat] = levels
        return drafted

    def acceptance_of(self, text: HeldOutText) -> AcceptanceCounts:
        target_out = self.outputs_for_text(text)
        rows = acceptance.start_positions(target_out.ids[0], text.prompt)
        drafts = self.drafts(target_out, self.config.draft_length)[rows]
        ranks = acceptance.candidate_ranks(drafts[..., None], target_out.ids[0], rows)
        return acceptance.simulate_decoding(ranks == 0)

    def describe(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.head.parameters())
        return (
            f"{self.what} for `{run_name(self.config.model)}` ({self.num_layers} layers, width "
            f"{self.shape.hidden_size}, vocabulary {self.vocab_size:,}): {parameters:,} parameters "
            f"in {self.stored_dtype}, trained by Paceline on that target's hidden states and "
            "probabilities. It drafts for this target only: "
            f"`paceline generate --model TARGET --draft {self.spec}FOLDER`."
        )
