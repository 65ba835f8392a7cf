"""The network of block drafters: a few layers draft a whole block of tokens in one pass.

DFlash (arXiv 2602.06036): the rows of a block are the last committed token (the anchor) and masks.
They attend to each other, and to the text before the anchor: every layer turns the target's fused
features of the text into keys and values. In JetSpec (arXiv 2606.18394) the rows of a block attend
causally, which makes better trees. DSpark (arXiv 2607.05147) adds a low-rank bias to each row's
logits, which depends on the token before it, and predicts how likely the row's draft is accepted::

    position              0 ... n-2        n-1      n      n+1
    keys and values       f0 ... f_n-2     anchor   mask   mask     attend to all before, each other
    drafts, DFlash                                  x_n    x_n+1
    drafts, from_anchor                    x_n      x_n+1  x_n+2

A checkpoint is a folder with config.json and model.safetensors; parameter names::

    fc  hidden_norm  norm  [embed_tokens]  [lm_head]
    layers.N.{input_layernorm,self_attn,post_attention_layernorm,mlp}
    markov_head.{markov_w1,markov_w2,[gate_proj]}  confidence_head.proj

===========  ==================================================================================
z-lab        DFlash: ``dflash_config: {target_layer_ids, mask_token_id}``, ``block_size`` (there or
             in it), ``num_target_layers``; embedding and head are the target's. The anchor's row
             drafts nothing. JetSpec's have ``causal_head`` there, and ``is_causal`` at the top for
             vLLM and SGLang
DeepSpec     DSpark, and DFlash as DeepSeek trains it: ``target_layer_ids``, ``mask_token_id``,
             ``markov_rank``, ``enable_confidence_head`` ... at the top; it may contain copies of
             the target's ``embed_tokens`` and ``lm_head``. The anchor's row drafts, too
speculators  both: ``transformer_layer_config``, ``aux_hidden_state_layer_ids``,
             ``sample_from_anchor``; ``d2t`` and ``t2d`` for a draft vocabulary
===========  ==================================================================================

z-lab and DeepSpec number layers by the OUTPUT that is read (-1: the embedding), speculators and
this package by the INPUT, one more. ``feature_layers=`` of the spec overrides the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.draft.heads.checkpoint import (
    FILES,
    SPECULATORS,
    WEIGHTS,
    Checkpoint,
    flat_options,
    read_checkpoint,
    speculators_options,
    weights_kind,
    write_checkpoint,
)
from paceline.draft.heads.network import AttendingHead, HeadLayer, HeadShape
from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.backends.base import Attend

MARKOV = "vanilla", "gated"


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadShape):
    """Shape of a head, which is as wide as its target. ``from_anchor``: the anchor's row drafts,
    too. ``causal``: the rows of a block attend causally. ``markov_rank``: rank of the bias that
    depends on the previous token; 0: no bias."""

    block_size: int
    mask_token: int
    from_anchor: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False

    def _problem(self) -> str | None:
        if not 0 <= self.mask_token < self.vocab_size:
            return f"the mask token {self.mask_token} is not one of {self.vocab_size} tokens"
        if self.block_size < 2:
            return f"a block of {self.block_size} drafts nothing; use at least 2"
        if self.markov_rank and self.markov_type not in MARKOV:
            known = " and ".join(MARKOV)
            return f"a markov head of type {self.markov_type!r} is not supported; {known} are"
        return super()._problem()

    @property
    def drafts(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class _Markov(nn.Module):
    """The bias of a row's logits, ``W2 W1[previous token]``, with a gate by the row's output."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.columns, bias=False)
        if config.markov_type == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, known: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """``known [..., rank]``: ``markov_w1`` of previous tokens. ``outputs [..., hidden]``."""
        if hasattr(self, "gate_proj"):
            known = torch.sigmoid(self.gate_proj(torch.cat((outputs, known), -1))) * known
        return self.markov_w2(known)  # type: ignore[no-any-return]


class _Confidence(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class BlockHead(AttendingHead):
    """Weights and forward of a head, for training and drafting."""

    def __init__(self, config: BlockConfig, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__(config)
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, ("input_layernorm",), size, normed=True) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.columns, bias=False) if config.has_lm_head else None
        self.markov_head = _Markov(config) if config.markov_rank else None
        with_markov = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = _Confidence(size + with_markov) if config.confidence else None
        if config.reduced:
            self.register_vocabulary(config, draft_ids)
        else:
            self.register_buffer("draft_ids", None)

    def context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each layer, ``[1, kv_heads, T, width]``, of features ``[T, layers
        * hidden]`` at ``positions [T]``."""
        fused = self.hidden_norm(self.fc(features))
        angles = self.angles(positions, self.norm.weight)
        for layer in self.layers:
            attention: Any = layer.self_attn
            yield attention.keys_values(fused, angles)

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Outputs ``[T, hidden]``, after the final norm, of the rows of blocks at ``positions
        [T]``. ``embeds [T, hidden]``: their embeddings."""
        angles = self.angles(positions, self.norm.weight)
        for number, layer in enumerate(self.layers):
            norm: Any = layer.input_layernorm
            embeds = layer(norm(embeds), embeds, angles, attend, number)
        outputs: torch.Tensor = self.norm(embeds)
        return outputs

    def bias(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """The bias of logits, ``[..., columns]``, given the previous tokens ``before`` int64
        ``[...]``; None if the head has none."""
        if self.markov_head is None:
            return None
        bias: torch.Tensor = self.markov_head(self.markov_head.markov_w1(before), outputs)
        return bias

    def confidence(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logit of the chance that each row's draft is accepted, ``[...]``."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            outputs = torch.cat((outputs, self.markov_head.markov_w1(before)), -1)
        chance: torch.Tensor = self.confidence_head.proj(outputs)
        return chance.squeeze(-1)


_CAUSAL = ("causal_head", "causal", "is_causal")
_KINDS = {"dflash": "DFlash head", "dspark": "DSpark head"}


def usual_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """The ``count`` layers whose inputs are read by default. z-lab's rule: evenly spread from the
    second to the third last; a single one is in the middle."""
    if count == 1:
        return (target_layers // 2 + 1,)
    step = (target_layers - 4) / (count - 1)
    return tuple(max(1, round(1 + number * step) + 1) for number in range(count))


def load_block(
    source: str | Checkpoint,
    target: Target,
    kind: str,
    feature_layers: tuple[int, ...] | None = None,
) -> BlockHead:
    """Load a head of ``kind`` ("dflash" or "dspark") for ``target``, on the CPU, in the dtype of
    its file. ``source`` as in ``read_checkpoint``. ``feature_layers``: instead of those in the
    config. Raises ModelLoadError for missing or damaged files, other weights, or another target."""
    stored = read_checkpoint(source, FILES, _KINDS[kind])
    checkpoint = replace(stored, config=_options(stored), tensors=stored.plain_tensors())
    if weights_kind(checkpoint.tensors)[1] != kind:
        raise stored.another_kind()
    config = _config(checkpoint, target, feature_layers)
    ids = checkpoint.draft_ids(config) if config.reduced else None
    if not config.reduced:
        for key in ("d2t", "t2d"):
            checkpoint.tensors.pop(key, None)
    return checkpoint.filled(lambda: BlockHead(config, ids))


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of any layout in DeepSpec's form; "inputs": the layers whose inputs are read."""
    options = checkpoint.options()
    if SPECULATORS in options:
        layers = {"inputs": options.get("aux_hidden_state_layer_ids")}
        return {"sample_from_anchor": options[SPECULATORS] == "dspark"} | options | layers
    nested = options.get("dflash_config")
    options["sample_from_anchor"] = not isinstance(nested, dict)
    if isinstance(nested, dict):
        options |= {key: value for key, value in nested.items() if value is not None}
    outputs = options.get("target_layer_ids")
    if isinstance(outputs, list) and all(type(layer) is int for layer in outputs):
        outputs = [layer + 1 for layer in outputs]
    return options | {"inputs": outputs}


def _config(
    checkpoint: Checkpoint, target: Target, feature_layers: tuple[int, ...] | None
) -> BlockConfig:
    """The head's shape, from its config and tensors, checked against the target."""
    options, tensors = checkpoint.config, checkpoint.tensors
    layers = list(feature_layers) if feature_layers else options["inputs"]
    if layers is None:
        count = tensors["fc.weight"].shape[-1] // checkpoint.whole("hidden_size")
        layers = list(usual_layers(target.num_layers, count))
    shape = checkpoint.shape(target, layers)
    sizes = shape["hidden_size"], shape["vocab_size"], options.get("num_target_layers")
    checkpoint.check_target(target, *sizes)
    if "sliding_attention" in str(options.get("layer_types")):
        raise ModelLoadError(f"{checkpoint.title} has sliding windows, which are not supported")
    if type(options.get("mask_token_id")) is not int:
        raise ModelLoadError(
            f"the config.json of {checkpoint.name} has no mask_token_id, the token that stands for "
            "what is to be drafted; copy the file again"
        )
    first = tensors.get("markov_head.markov_w1.weight")
    logits = tensors.get("lm_head.weight")
    shape |= {
        "block_size": checkpoint.whole("block_size"),
        "mask_token": options["mask_token_id"],
        "from_anchor": bool(options["sample_from_anchor"]),
        "causal": any(options.get(key) for key in _CAUSAL),
        "draft_vocab_size": None if logits is None else logits.shape[0],
        "markov_rank": 0 if first is None else first.shape[-1],
        "markov_type": str(options.get("markov_head_type", "vanilla")),
        "confidence": "confidence_head.proj.weight" in tensors,
        "confidence_with_markov": first is not None
        and bool(options.get("confidence_head_with_markov", False)),
    }
    return checkpoint.made(lambda: BlockConfig(**shape))


# -- writing ---------------------------------------------------------------------------------


def save_block(
    head: BlockHead,
    folder: Path,
    layout: str | None = None,
    target_name: str | None = None,
    target_architectures: tuple[str, ...] = ("LlamaForCausalLM",),
) -> None:
    """Write a head in a layout of ``layouts_of``; None: the first. ``target_name``: for the
    speculators config. Raises ConfigError for a head that the layout cannot hold."""
    config, fits = head.config, layouts_of(head.config)
    layout = layout or next(iter(fits), "speculators")
    if layout not in fits:
        instead = f"use {fits[0]!r}" if fits else "no layout can"
        raise ConfigError(f"the layout of {layout} cannot hold this head; {instead}")
    options = _written_options(config, layout, (target_name, target_architectures))
    write_checkpoint(folder, WEIGHTS, dict(head.state_dict()), options)


def layouts_of(config: BlockConfig) -> list[str]:
    """The layouts that can hold a head, that of the method's authors first."""
    authors = "deepspec" if config.from_anchor else "z-lab"
    bare = not config.from_anchor and (config.markov_rank or config.confidence)
    fits = {authors: not config.reduced and not bare, "speculators": not config.causal}
    return [layout for layout, fit in fits.items() if fit]


def _written_options(
    config: BlockConfig, layout: str, verifier: tuple[str | None, tuple[str, ...]]
) -> dict[str, Any]:
    """The config.json of a layout."""
    flat = flat_options(config, "qwen3")
    layers = {"target_layer_ids": [layer - 1 for layer in config.feature_layers]}
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    sizes = {"block_size": config.block_size, "num_target_layers": config.target_layers}
    masked = {"mask_token_id": config.mask_token}
    seen = {"is_causal": True} if config.causal else {}
    if layout == "z-lab":
        causal = {"causal_head": True} if config.causal else {}
        nested = {"dflash_config": masked | layers | causal}
        return {"architectures": ["DFlashDraftModel"], **flat, **sizes, **nested, **seen}
    if layout == "deepspec":
        more = {**masked, **sizes, "num_anchors": 512, **layers, **seen, **heads}
        return {"architectures": ["Qwen3DSparkModel"], **flat, **more}
    extended = bool(config.markov_rank or config.confidence)
    kind, name = ("dspark", "DSparkDraftModel") if extended else ("dflash", "DFlashDraftModel")
    return {
        **speculators_options(kind, name, flat, config.drafts, verifier),
        "draft_vocab_size": config.columns,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "sample_from_anchor": config.from_anchor,
        **masked,
        **(heads if extended else {}),
    }
