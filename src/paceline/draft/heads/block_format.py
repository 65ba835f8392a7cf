"""Checkpoints of block drafters in their public layouts, read and written.

A folder with config.json and model.safetensors; the tensors have the names of ``BlockHead``:

===========  ==================================================================================
z-lab        DFlash: ``dflash_config: {target_layer_ids, mask_token_id}``, ``block_size`` (there or
             in it), ``num_target_layers``; embedding and head are the target's. The anchor's row
             drafts nothing. JetSpec's have ``causal_head`` there; ``is_causal`` at the top is what
             vLLM and SGLang read
DeepSpec     DSpark, and DFlash as DeepSeek trains it: ``target_layer_ids``, ``mask_token_id``,
             ``markov_rank``, ``enable_confidence_head`` ... at the top; copies of the target's
             ``embed_tokens`` and ``lm_head`` may be there. The anchor's row drafts, too
speculators  both: ``transformer_layer_config``, ``aux_hidden_state_layer_ids``,
             ``sample_from_anchor``; ``d2t`` and ``t2d`` for a draft vocabulary
===========  ==================================================================================

z-lab and DeepSpec count layers whose OUTPUT is read (-1: the embedding), speculators and this
package those whose INPUT is: one more. ``layers=`` of the spec replaces what a config says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.draft.heads.block_head import BlockConfig, BlockHead
from paceline.draft.heads.checkpoint import (
    Checkpoint,
    read_checkpoint,
    weights_kind,
    write_checkpoint,
)
from paceline.draft.heads.eagle_format import is_speculators, rotary, whole
from paceline.draft.heads.eagle_head import SIZES
from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError

WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "pytorch_model.bin")
LAYOUTS = ("z-lab", "deepspec", "speculators")
# Copies of the target's weights and tables that follow from the config.
_COPIES = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_CAUSAL = ("causal_head", "causal", "is_causal")
_KINDS = {"dflash": "DFlash head", "dspark": "DSpark head"}


def usual_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """Layers whose inputs are read where nothing says so: z-lab's rule, ``count`` ones spread from
    the second to the third last (the middle one alone)."""
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
    """A head of ``kind`` ("dflash" or "dspark") for ``target``, on the CPU, in the dtype of its
    file. ``source``: a name, or a checkpoint, whose values but ``d2t``'s may be on the meta device;
    then so is the head. ``feature_layers`` replace the config's. Raises ModelLoadError for missing
    or damaged files, other weights, or another target."""
    noun = _KINDS[kind]
    checkpoint = read_checkpoint(source, FILES, noun) if isinstance(source, str) else source
    name = checkpoint.name
    tensors = {key.removeprefix("model."): value for key, value in checkpoint.tensors.items()}
    tensors = {key: value for key, value in tensors.items() if not key.endswith(_COPIES)}
    if weights_kind(tensors)[1] != kind:
        raise checkpoint.another_kind(noun)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    flat = _flat(name, checkpoint.config)
    config = _config(checkpoint, noun, flat, tensors, target, feature_layers)
    ids = None
    if config.reduced:
        count = config.columns
        if offsets is None or offsets.shape != (count,):
            raise ModelLoadError(
                f"the {noun} {name} drafts {count} of {config.vocab_size} tokens, but has no d2t "
                "of that length that says which; its files do not belong together"
            )
        ids = offsets.to(torch.int64) + torch.arange(count)
        if bool((ids.diff() <= 0).any()) or ids[0] < 0 or ids[-1] >= config.vocab_size:
            raise ModelLoadError(
                f"d2t of the {noun} {name} does not name ascending tokens below "
                f"{config.vocab_size}; it must hold offsets (target id = i + d2t[i])"
            )
    with tensors["fc.weight"].device:
        head = BlockHead(config, ids)
    checkpoint.check_shapes(noun, head, tensors)
    head.load_state_dict(tensors)
    return head.to(tensors["fc.weight"].dtype)


def _flat(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The options of any layout as those of DeepSpec's, with layers whose inputs are read."""
    if is_speculators(config):
        from transformers import AutoConfig

        try:  # the nested config leaves out what is the default of its kind
            layer: dict[str, Any] = AutoConfig.for_model(
                **config["transformer_layer_config"]
            ).to_dict()
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"the transformer_layer_config of {name} cannot be read ({error}); "
                "copy config.json again"
            ) from None
        flat = layer | {key: value for key, value in config.items() if value is not None}
        by_kind = config.get("speculators_model_type") == "dspark"
        flat["sample_from_anchor"] = config.get("sample_from_anchor", by_kind)
        return flat | {"inputs": config.get("aux_hidden_state_layer_ids")}
    nested = config.get("dflash_config")
    flat = config | {"sample_from_anchor": not isinstance(nested, dict)}
    flat |= {key: v for key, v in (nested or {}).items() if v is not None}
    outputs = flat.get("target_layer_ids")
    if isinstance(outputs, list) and all(type(layer) is int for layer in outputs):
        outputs = [layer + 1 for layer in outputs]
    return flat | {"inputs": outputs}


def _config(
    checkpoint: Checkpoint,
    noun: str,
    flat: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: Target,
    feature_layers: tuple[int, ...] | None,
) -> BlockConfig:
    """The head's shape by config and tensors, checked against the target."""
    name = checkpoint.name
    needed = "hidden_size", "num_attention_heads", "vocab_size"
    hidden, heads, vocab = (whole(name, flat, key) for key in needed)
    checkpoint.check_target(noun, target, hidden, vocab, flat.get("num_target_layers"))
    flat = {
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "max_position_embeddings": 2048,
        **{key: value for key, value in flat.items() if value is not None},
    }
    if "sliding_attention" in flat.get("layer_types", ()):
        raise ModelLoadError(f"the {noun} {name} has sliding windows, which are not supported")
    if type(flat.get("mask_token_id")) is not int:
        raise ModelLoadError(
            f"the config.json of {name} has no mask_token_id, the token that stands for what is to "
            "be drafted; copy the file again"
        )
    layers = list(feature_layers) if feature_layers else flat.get("inputs")
    if layers is None:
        count = tensors["fc.weight"].shape[-1] // hidden
        layers = list(usual_layers(target.num_layers, count))
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise ModelLoadError(f"the layers that {name} reads are {layers!r}, not a list of numbers")
    theta, scaling = rotary(flat)
    first = tensors.get("markov_head.markov_w1.weight")
    logits = tensors.get("lm_head.weight")
    try:
        return BlockConfig(
            **{field: whole(name, flat, key) for key, field in SIZES.items()},
            layers=whole(name, flat, "num_hidden_layers"),
            target_layers=target.num_layers,
            feature_layers=tuple(layers),
            block_size=whole(name, flat, "block_size"),
            mask_token=flat["mask_token_id"],
            from_anchor=bool(flat["sample_from_anchor"]),
            causal=any(flat.get(key) for key in _CAUSAL),
            draft_vocab_size=None if logits is None else logits.shape[0],
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
            attention_bias=any(key.endswith("q_proj.bias") for key in tensors),
            markov_rank=0 if first is None else first.shape[-1],
            markov_type=str(flat.get("markov_head_type", "vanilla")),
            confidence="confidence_head.proj.weight" in tensors,
            confidence_with_markov=first is not None
            and bool(flat.get("confidence_head_with_markov", False)),
            has_embedding="embed_tokens.weight" in tensors,
            has_lm_head=logits is not None,
        )
    except ConfigError as error:
        raise ModelLoadError(f"the {noun} {name} does not fit the target: {error}") from None


# -- writing ---------------------------------------------------------------------------------


def save_block(
    head: BlockHead,
    folder: Path,
    layout: str | None = None,
    target_name: str | None = None,
    target_architectures: tuple[str, ...] = ("LlamaForCausalLM",),
) -> None:
    """Write a head in one of ``LAYOUTS``; None: the first that can hold it, its makers' if it can.
    ``target_name`` tells engines that load speculators which model to verify with. Raises
    ConfigError for a head that the layout cannot hold."""
    config, fits = head.config, layouts_of(head.config)
    layout = layout or next(iter(fits), LAYOUTS[0])
    if layout not in LAYOUTS:
        raise ConfigError(f"block layout {layout!r} is unknown; use {', '.join(LAYOUTS)}")
    if layout not in fits:
        instead = f"use {fits[0]!r}" if fits else "no layout can"
        raise ConfigError(f"the layout of {layout} cannot hold this head; {instead}")
    verifier = {"name_or_path": target_name, "architectures": list(target_architectures)}
    tensors = dict(head.state_dict())
    if layout == "speculators" and head.draft_ids is not None:
        tensors["d2t"] = head.draft_ids - torch.arange(config.columns)
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[head.draft_ids] = True
        tensors["t2d"] = known
    write_checkpoint(folder, WEIGHTS, tensors, _options(config, layout, verifier))


def layouts_of(config: BlockConfig) -> list[str]:
    """The layouts that can hold a head, its makers' first."""
    authors = "deepspec" if config.from_anchor else "z-lab"
    bare = not config.from_anchor and (config.markov_rank or config.confidence)
    fits = {authors: not config.reduced and not bare, "speculators": not config.causal}
    return [layout for layout, fit in fits.items() if fit]


def _layer_options(config: BlockConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": config.layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **{key: getattr(config, field) for key, field in SIZES.items()},
    }


def _options(config: BlockConfig, layout: str, verifier: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a layout."""
    flat = _layer_options(config)
    outputs = [layer - 1 for layer in config.feature_layers]
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    masked = {"mask_token_id": config.mask_token}
    seen = {"is_causal": True} if config.causal else {}
    if layout == "z-lab":
        return {
            "architectures": ["DFlashDraftModel"],
            **flat,
            "block_size": config.block_size,
            "num_target_layers": config.target_layers,
            "dflash_config": masked
            | {"target_layer_ids": outputs}
            | ({"causal_head": True} if config.causal else {}),
            **seen,
        }
    if layout == "deepspec":
        return {
            "architectures": ["Qwen3DSparkModel"],
            **flat,
            **masked,
            "block_size": config.block_size,
            "num_target_layers": config.target_layers,
            "num_anchors": 512,
            "target_layer_ids": outputs,
            **seen,
            **heads,
        }
    extended = bool(config.markov_rank or config.confidence)
    kind = "dspark" if extended else "dflash"
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.drafts}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["DSparkDraftModel" if extended else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "tie_word_embeddings": False,
        "draft_vocab_size": config.columns,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "sample_from_anchor": config.from_anchor,
        **masked,
        **(heads if kind == "dspark" else {}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": flat,
    }
