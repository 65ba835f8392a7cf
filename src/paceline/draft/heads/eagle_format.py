"""EAGLE checkpoints in their public layouts, read and written.

A folder with config.json and model.safetensors (or pytorch_model.bin, read without running code):

=================  ====================================================================
EAGLE-3            ``midlayer.*`` (attention input 2H), ``fc.weight [H, 3 H_target]``, ``norm``,
                   ``lm_head [draft vocabulary, H]``, ``d2t`` int64 offsets (target id = i +
                   d2t[i]), ``t2d`` bool, ``embed_tokens`` or else the target's
EAGLE-1, EAGLE-2   ``fc.weight [H, 2H]``, ``layers.0.*`` without an input norm, ``embed_tokens``
                   or else the target's; the target's head makes the logits
speculators        EAGLE-3 with its layer under ``layers.0`` and a nested config (layouts.py)
=================  ====================================================================

``eagle_aux_hidden_state_layer_ids`` (also under ``eagle_config``) are layers whose INPUTS the head
reads, as vLLM takes them. Heads made for SGLang count outputs, one less: give ``feature_layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.draft.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from paceline.draft.heads.layouts import (
    FILES,
    WEIGHTS,
    Tensors,
    draft_ids,
    flat_options,
    from_speculators,
    is_speculators,
    plain_names,
    shape_of,
    speculators_options,
    whole,
)
from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError

_KIND = "EAGLE head"
LAYOUTS = ("eagle", "speculators")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TARGET_LAYERS = "paceline_target_layers"  # no published option has the target's depth
_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "norm_before_fc": False}
_DRAFTED_TOKENS = 4  # proposed per step by engines that go by the config
TargetHead = Callable[[torch.Tensor], torch.Tensor]


def load_eagle(
    source: str | Checkpoint,
    target: Target,
    version: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
    target_head: TargetHead | None = None,
) -> EagleHead:
    """A head for ``target``, on the CPU, in the dtype of its file.

    ``source``: a folder, built-in or hub name, or a checkpoint, whose values but ``d2t``'s and
    ``t2d``'s may be on the meta device; then so is the head. ``version`` 1 (also EAGLE-2) or 3
    refuses the other. ``feature_layers`` replace the config's. ``target_head`` is for heads without
    logits of their own. Raises ModelLoadError for missing or damaged files, other weights, or
    another target.
    """
    checkpoint = read_checkpoint(source, FILES, _KIND)
    name = checkpoint.name
    tensors = _public_names(checkpoint)
    eagle_version = 3 if "midlayer.hidden_norm.weight" in tensors or "d2t" in tensors else 1
    if version is not None and version != eagle_version:
        raise ModelLoadError(
            f"{name} is an EAGLE-{eagle_version} head, not EAGLE-{version}; "
            f"use --draft {'eagle3' if eagle_version == 3 else 'eagle'}:{name}"
        )
    flat = _flat(name, checkpoint.config)
    if feature_layers is not None:
        flat = flat | {_LAYERS: list(feature_layers)}
    config = _config(checkpoint, flat, tensors, target, eagle_version)
    ids = draft_ids(checkpoint.title, config, tensors) if eagle_version == 3 else None
    return checkpoint.filled(lambda: EagleHead(config, ids, target_head), tensors)


def save_eagle(
    head: EagleHead,
    folder: Path,
    layout: str = "eagle",
    target_name: str | None = None,
    target_architectures: tuple[str, ...] = ("LlamaForCausalLM",),
) -> None:
    """Write a head; ``layout``: "eagle" (its authors') or "speculators". ``target_name`` tells
    engines that load speculators which model to verify with. Raises ConfigError for a head that the
    layout cannot hold."""
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
    if layout == "eagle":
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
    nested = speculators_options("eagle3", "Eagle3DraftModel", options, _DRAFTED_TOKENS, verifier)
    write_checkpoint(folder, WEIGHTS, renamed, nested | more)


def _public_names(checkpoint: Checkpoint) -> Tensors:
    """The tensors under EagleHead's names. Raises ModelLoadError if they are not an EAGLE
    head's."""
    tensors = plain_names(checkpoint)
    if "fc.weight" not in tensors:
        raise checkpoint.another_kind()
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {key.replace("layers.0.", "midlayer."): v for key, v in tensors.items()}
    if "midlayer.hidden_norm.weight" not in tensors and "d2t" not in tensors:
        tensors.pop("lm_head.weight", None)  # EAGLE-1 drafts with the target's: a copy of it
    return tensors


def _flat(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The options of either layout in one level. Raises ModelLoadError."""
    if not is_speculators(config):
        return config
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ModelLoadError(
            f"{name} is a speculators checkpoint of type {kind!r}; of that format only eagle3 "
            "can be loaded here"
        )
    # vLLM takes an absent option as true; the library itself always writes it.
    return {"norm_before_residual": True} | from_speculators(name, config)


def _config(
    checkpoint: Checkpoint, flat: dict[str, Any], tensors: Tensors, target: Target, version: int
) -> EagleConfig:
    """The head's shape by config and tensors, checked against the target."""
    name = checkpoint.name
    layers = stated_layers(flat) or list(default_feature_layers(version, target.num_layers))
    shape = shape_of(name, flat, tensors, target, layers)
    hidden, vocab, d2t = shape["hidden_size"], shape["vocab_size"], tensors.get("d2t")
    usual = {
        "target_hidden_size": hidden,
        "draft_vocab_size": vocab if d2t is None else max(1, d2t.numel()),
    }
    flat = usual | {key: value for key, value in flat.items() if value is not None}
    width, drafted = (whole(name, flat, key) for key in usual)
    checkpoint.check_target(target, width, vocab, flat.get(_TARGET_LAYERS))
    for key, known in _ONLY.items():
        if flat.get(key) not in (None, known):  # it would load, but draft wrongly
            raise ModelLoadError(
                f"{checkpoint.title} has {key} {flat[key]!r}; only {known!r} is supported"
            )
    if not shape["has_embedding"] and hidden != width:
        raise ModelLoadError(
            f"{checkpoint.title} is {hidden} wide and has no embed_tokens, but the target's "
            f"embedding is {width} wide; its weights are incomplete"
        )
    shape |= {
        "version": version,
        "target_hidden_size": width,
        "draft_vocab_size": vocab if version == 1 else drafted,
        "fc_bias": "fc.bias" in tensors,
        "norm_before_residual": bool(flat.get("norm_before_residual", False)),
        "has_lm_head": shape["has_lm_head"] or version == 1,
    }
    return checkpoint.made(lambda: EagleConfig(**shape))


def stated_layers(config: dict[str, Any]) -> Any:
    """The feature layers named in a config.json, in either form; empty or None for none."""
    nested = config.get("eagle_config")
    return config.get(_LAYERS) or (nested.get(_LAYERS) if isinstance(nested, dict) else None)
