"""The EAGLE head: one or more decoder layers that extrapolate the target's features (see eagle.py).

The inputs of row t are the target's feature at position t and the embedding of token t + 1; its
logits are for token t + 2. Drafted rows take the head's own hidden output instead of a feature.

A checkpoint is a folder with config.json and model.safetensors (or pytorch_model.bin, no code run):

=================  ====================================================================
EAGLE-3            ``midlayer.*`` (attention input 2H), ``fc.weight [H, 3 H_target]``, ``norm``,
                   ``lm_head [draft vocabulary, H]``, ``d2t`` int64 offsets (target id = i +
                   d2t[i]), ``t2d`` bool, ``embed_tokens`` or else the target's
EAGLE-1, EAGLE-2   ``fc.weight [H, 2H]``, ``layers.0.*`` without an input norm, ``embed_tokens``
                   or else the target's; the target's head makes the logits
P-EAGLE            EAGLE-3 with ``mask_hidden [1, 3 H_target]``, ``ptd_token_id`` (or
                   ``pard_token``) in the config, and often plain layers ``layers.1 ...``
speculators        EAGLE-3 with its layer under ``layers.0`` and a nested config (checkpoint.py);
                   P-EAGLE as "peagle", with ``mask_token_id``
=================  ====================================================================

``eagle_aux_hidden_state_layer_ids`` (also under ``eagle_config``) are the layers whose INPUTS the
head reads, as in vLLM. Configs of heads for SGLang number layers by their outputs, one less: give
``feature_layers`` for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.draft.heads.checkpoint import (
    FILES,
    MASK_OPTIONS,
    SPECULATORS,
    WEIGHTS,
    Checkpoint,
    flat_options,
    read_checkpoint,
    speculators_options,
    write_checkpoint,
)
from paceline.draft.heads.network import AttendingHead, HeadLayer, HeadShape
from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.backends.base import Attend


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """Shape of an EAGLE head; ``version`` 1 (also EAGLE-2) or 3. Heads of version 1 draft with the
    target's language-model head, and have its vocabulary and width."""

    version: int
    target_hidden_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual starts behind hidden_norm
    has_lm_head: bool = True
    mask_token: int | None = None  # P-EAGLE: the token of drafted rows

    def _problem(self) -> str | None:
        narrower = self.hidden_size != self.target_hidden_size
        if self.version not in (1, 3):
            return f"EAGLE version {self.version} is unknown; use 1 (also for 2) or 3"
        if self.version == 1 and (len(self.feature_layers) > 1 or narrower):
            return (
                "EAGLE-1 continues the feature of one target layer at the target's own width; "
                "use version 3 for several layers or another width"
            )
        if self.version == 1 and self.layers > 1:
            return f"EAGLE-1 has one layer, not {self.layers}"
        if self.version == 3 and not self.has_lm_head and narrower:
            return "it has no lm_head, and the target's fits heads of its width"
        return super()._problem()


def default_feature_layers(version: int, target_layers: int) -> tuple[int, ...]:
    """The papers' layers: an early, a middle and a late one (version 3), the final output (1)."""
    if version == 1:
        return (target_layers,)
    early, late = min(2, target_layers), max(0, target_layers - 3)
    return (early, target_layers // 2, late)


class EagleHead(AttendingHead):
    """Weights and forward of a head, for training and drafting. ``target_head``: the target's head,
    ``[T, hidden]`` to ``[T, vocab]``, for version 1 and checkpoints without ``lm_head``."""

    target_head: Callable[[torch.Tensor], torch.Tensor] | None

    def __init__(
        self,
        config: EagleConfig,
        draft_ids: Sequence[int] | torch.Tensor | None = None,
        target_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(config)
        self.config = config
        # Not a submodule: the target's weights are not part of the head.
        self.__dict__["target_head"] = target_head
        size = config.hidden_size
        if config.version == 3:
            inputs = len(config.feature_layers) * config.target_hidden_size
            self.fc = nn.Linear(inputs, size, bias=config.fc_bias)
            self.midlayer = HeadLayer(config, ("input_layernorm", "hidden_norm"), 2 * size)
            later_layers = range(1, config.layers)
            self.layers: Any = nn.ModuleDict(
                {str(n): HeadLayer(config, ("input_layernorm",), size) for n in later_layers}
            )
            self.norm = nn.RMSNorm(size, config.rms_norm_eps)
            if config.has_lm_head:
                self.lm_head = nn.Linear(size, config.columns, bias=False)
            if config.mask_token is not None:
                self.mask_hidden = nn.Parameter(torch.randn(1, inputs))  # those rows' feature
            self.register_vocabulary(config, draft_ids)
        else:
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
            self.layers = nn.ModuleList([HeadLayer(config, (), size)])

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project the target's features ``[T, layers * target_hidden]`` to ``[T, H]``."""
        if self.config.version == 1:
            return features
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[T, H]`` at ``positions [T]``, before the final norm; with ``output_rows
        [N]`` only those rows, ``[N, H]``. They are the next level's ``hidden``.

        ``embeds [T, H]``: embeddings of the next tokens. ``hidden [T, H]``: fused features or
        earlier outputs. The attention's input is ``[norm(embeds), norm(hidden)]`` in version 3, and
        in version 1 both fused, without a norm."""
        angles, (layer, *later_layers) = self.angles(positions, hidden), self.decoder
        if self.config.version == 3:
            normed = layer.hidden_norm(hidden)
            x = torch.cat((layer.input_layernorm(embeds), normed), -1)
            residual = normed if self.config.norm_before_residual else hidden
        else:
            x = residual = self.fc(torch.cat((embeds, hidden), -1))
        for number, following in enumerate(later_layers, 1):
            residual = layer(x, residual, angles, attend, number - 1)
            layer, x = following, following.input_layernorm(residual)
        return layer(x, residual, angles, attend, len(later_layers), output_rows)  # type: ignore[no-any-return]

    @property
    def decoder(self) -> list[Any]:
        """The layers in their order."""
        if self.config.version == 1:
            return list(self.layers)
        return [self.midlayer, *self.layers.values()]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, draft_vocab]`` of outputs ``[T, H]``, for the token after the embedded."""
        if self.config.version == 3:
            hidden = self.norm(hidden)
            if self.config.has_lm_head:
                return self.lm_head(hidden)  # type: ignore[no-any-return]
        if self.target_head is None:
            raise ConfigError("this EAGLE head drafts with the target's head; give target_head")
        return self.target_head(hidden)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ids of the draft vocabulary, of any shape, to ids of the target."""
        return ids + self.d2t[ids] if self.config.version == 3 else ids


LAYOUTS = ("eagle", "speculators")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TARGET_LAYERS = "paceline_target_layers"  # no published option has the target's depth
_ONLY = {"hidden_act": "silu", "norm_before_fc": False, "norm_output": False}
_DRAFTED_TOKENS = 4  # draft length for engines that take it from the config


def load_eagle(
    source: str | Checkpoint,
    target: Target,
    version: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
    target_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> EagleHead:
    """Load a head for ``target``, on the CPU, in the dtype of its file. ``source`` as in
    ``read_checkpoint``. ``version`` 1 (also EAGLE-2) or 3: others are refused. ``feature_layers``:
    instead of those in the config. ``target_head``: for heads without a language-model head. Raises
    ModelLoadError for missing or damaged files, other weights, or another target."""
    stored = read_checkpoint(source, FILES, "EAGLE head")
    checkpoint = replace(stored, config=_options(stored), tensors=_public_names(stored))
    eagle_version = 3 if _is_third(checkpoint.tensors) else 1
    if version is not None and version != eagle_version:
        raise ModelLoadError(
            f"{stored.name} is an EAGLE-{eagle_version} head, not EAGLE-{version}; "
            f"use --draft {'eagle3' if eagle_version == 3 else 'eagle'}:{stored.name}"
        )
    layers = stated_layers(checkpoint.config) if feature_layers is None else list(feature_layers)
    layers = layers or list(default_feature_layers(eagle_version, target.num_layers))
    config = _config(checkpoint, target, eagle_version, layers)
    ids = checkpoint.draft_ids(config) if eagle_version == 3 else None
    return checkpoint.filled(lambda: EagleHead(config, ids, target_head))


def save_eagle(
    head: EagleHead,
    folder: Path,
    layout: str = "eagle",
    target_name: str | None = None,
    target_architectures: tuple[str, ...] = ("LlamaForCausalLM",),
) -> None:
    """Write a head in a ``layout``: "eagle" (its authors') or "speculators", whose config has the
    ``target_name``. Raises ConfigError for a head that the layout cannot hold."""
    if layout not in LAYOUTS:
        raise ConfigError(f"EAGLE layout {layout!r} is unknown; use {' or '.join(LAYOUTS)}")
    config, tensors = head.config, dict(head.state_dict())
    third, options = config.version == 3, flat_options(config)
    more: dict[str, Any] = {_TARGET_LAYERS: config.target_layers}
    if third:
        more |= {
            "target_hidden_size": config.target_hidden_size,
            "draft_vocab_size": config.columns,
            "norm_before_residual": config.norm_before_residual,
            _LAYERS: list(config.feature_layers),
        }
    one_pass = config.mask_token is not None
    if layout == "eagle":
        more |= {MASK_OPTIONS[-1]: config.mask_token} if one_pass else {}
        architecture = "LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"
        more |= {"architectures": [architecture], **({} if third else {"bias": config.fc_bias})}
        write_checkpoint(folder, WEIGHTS, tensors, options | more)
        return
    if not third or config.fc_bias or len(config.feature_layers) != 3:
        raise ConfigError(
            "the speculators layout holds EAGLE-3 heads of three feature layers without a bias in "
            'fc; write this one with layout "eagle"'
        )
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
    verifier = target_name, target_architectures
    names = ("peagle", "PEagleSpeculator") if one_pass else ("eagle3", "Eagle3DraftModel")
    nested = speculators_options(*names, options, _DRAFTED_TOKENS, verifier)
    more |= {"mask_token_id": config.mask_token} if one_pass else {}
    write_checkpoint(folder, WEIGHTS, renamed, nested | more)


def _public_names(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors by the names in EagleHead. Raises ModelLoadError if it is not an EAGLE head."""
    tensors = checkpoint.plain_tensors()
    if "fc.weight" not in tensors:
        raise checkpoint.another_kind()
    if "mask_hidden" in tensors:  # speculators: [1, 1, n]
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()[None]
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {key.replace("layers.0.", "midlayer."): v for key, v in tensors.items()}
    if not _is_third(tensors):
        tensors.pop("lm_head.weight", None)  # in EAGLE-1 it is a copy of the target's
    return tensors


def _is_third(tensors: dict[str, torch.Tensor]) -> bool:
    return "midlayer.hidden_norm.weight" in tensors or "d2t" in tensors


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of either layout in that of the authors."""
    options = checkpoint.options()
    kind = options.get(SPECULATORS)
    if kind is None:
        return options
    if kind not in ("eagle3", "peagle"):
        raise ModelLoadError(
            f"{checkpoint.name} is a speculators checkpoint of type {kind!r}; of that format only "
            "eagle3 and peagle can be loaded here"
        )
    if "mask_token_id" in options:
        options[MASK_OPTIONS[-1]] = options["mask_token_id"]
    # If the option is missing, vLLM assumes True; the speculators library always writes it.
    return {"norm_before_residual": True} | options


def _config(checkpoint: Checkpoint, target: Target, version: int, layers: Any) -> EagleConfig:
    """The head's shape, from its config and tensors, checked against the target."""
    options, tensors = checkpoint.config, checkpoint.tensors
    shape = checkpoint.shape(target, layers)
    hidden, vocab, d2t = shape["hidden_size"], shape["vocab_size"], tensors.get("d2t")
    width = checkpoint.whole("target_hidden_size", hidden)
    drafted = checkpoint.whole("draft_vocab_size", vocab if d2t is None else max(1, d2t.numel()))
    checkpoint.check_target(target, width, vocab, options.get(_TARGET_LAYERS))
    for key, known in _ONLY.items():
        if options.get(key, known) != known:  # the head would load, but draft wrongly
            raise ModelLoadError(
                f"{checkpoint.title} has {key} {options[key]!r}; only {known!r} is supported"
            )
    if not shape["has_embedding"] and hidden != width:
        raise ModelLoadError(
            f"{checkpoint.title} is {hidden} wide and has no embed_tokens, but the target's "
            f"embedding is {width} wide; its weights are incomplete"
        )
    mask = next((options[key] for key in MASK_OPTIONS if key in options), None)
    one_pass = mask is not None or "mask_hidden" in tensors
    if one_pass and (type(mask) is not int or not 0 <= mask < vocab):
        raise ModelLoadError(
            f"the config.json of {checkpoint.name} has {mask!r} as the token for parallel drafting "
            f"({MASK_OPTIONS[-1]}), which is none of {vocab}; copy the file again"
        )
    shape |= {
        "version": version,
        "mask_token": mask,
        "target_hidden_size": width,
        "draft_vocab_size": vocab if version == 1 else drafted,
        "fc_bias": "fc.bias" in tensors,
        "norm_before_residual": bool(options.get("norm_before_residual", False)),
        "has_lm_head": shape["has_lm_head"] or version == 1,
    }
    return checkpoint.made(lambda: EagleConfig(**shape))


def stated_layers(config: dict[str, Any]) -> Any:
    """The feature layers that a config.json states, in either place; empty or None if none."""
    nested = config.get("eagle_config")
    return config.get(_LAYERS) or (nested.get(_LAYERS) if isinstance(nested, dict) else None)
