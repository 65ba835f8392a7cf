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

from paceline.draft.heads.block_head import BlockConfig, BlockHead
from paceline.draft.heads.checkpoint import (
    Checkpoint,
    read_checkpoint,
    weights_kind,
    write_checkpoint,
)
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

LAYOUTS = ("z-lab", "deepspec", "speculators")
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
    checkpoint = read_checkpoint(source, FILES, _KINDS[kind])
    tensors = plain_names(checkpoint)
    if weights_kind(tensors)[1] != kind:
        raise checkpoint.another_kind()
    flat = _flat(checkpoint.name, checkpoint.config)
    config = _config(checkpoint, flat, tensors, target, feature_layers)
    ids = draft_ids(checkpoint.title, config, tensors) if config.reduced else None
    if not config.reduced:
        for key in ("d2t", "t2d"):
            tensors.pop(key, None)
    return checkpoint.filled(lambda: BlockHead(config, ids), tensors)


def _flat(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The options of any layout as those of DeepSpec's, with layers whose inputs are read."""
    if is_speculators(config):
        by_kind = {"sample_from_anchor": config["speculators_model_type"] == "dspark"}
        flat = by_kind | from_speculators(name, config)
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
    flat: dict[str, Any],
    tensors: Tensors,
    target: Target,
    feature_layers: tuple[int, ...] | None,
) -> BlockConfig:
    """The head's shape by config and tensors, checked against the target."""
    name, flat = checkpoint.name, {key: value for key, value in flat.items() if value is not None}
    layers = list(feature_layers) if feature_layers else flat.get("inputs")
    if layers is None:
        count = tensors["fc.weight"].shape[-1] // whole(name, flat, "hidden_size")
        layers = list(usual_layers(target.num_layers, count))
    shape = shape_of(name, flat, tensors, target, layers)
    sizes = shape["hidden_size"], shape["vocab_size"], flat.get("num_target_layers")
    checkpoint.check_target(target, *sizes)
    if "sliding_attention" in flat.get("layer_types", ()):
        raise ModelLoadError(f"{checkpoint.title} has sliding windows, which are not supported")
    if type(flat.get("mask_token_id")) is not int:
        raise ModelLoadError(
            f"the config.json of {name} has no mask_token_id, the token that stands for what is to "
            "be drafted; copy the file again"
        )
    first = tensors.get("markov_head.markov_w1.weight")
    logits = tensors.get("lm_head.weight")
    shape |= {
        "layers": whole(name, flat, "num_hidden_layers"),
        "block_size": whole(name, flat, "block_size"),
        "mask_token": flat["mask_token_id"],
        "from_anchor": bool(flat["sample_from_anchor"]),
        "causal": any(flat.get(key) for key in _CAUSAL),
        "draft_vocab_size": None if logits is None else logits.shape[0],
        "markov_rank": 0 if first is None else first.shape[-1],
        "markov_type": str(flat.get("markov_head_type", "vanilla")),
        "confidence": "confidence_head.proj.weight" in tensors,
        "confidence_with_markov": first is not None
        and bool(flat.get("confidence_head_with_markov", False)),
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
    options = _options(config, layout, (target_name, target_architectures))
    write_checkpoint(folder, WEIGHTS, dict(head.state_dict()), options)


def layouts_of(config: BlockConfig) -> list[str]:
    """The layouts that can hold a head, its makers' first."""
    authors = "deepspec" if config.from_anchor else "z-lab"
    bare = not config.from_anchor and (config.markov_rank or config.confidence)
    fits = {authors: not config.reduced and not bare, "speculators": not config.causal}
    return [layout for layout, fit in fits.items() if fit]


def _options(
    config: BlockConfig, layout: str, verifier: tuple[str | None, tuple[str, ...]]
) -> dict[str, Any]:
    """The config.json of a layout."""
    flat = flat_options(config, config.layers, "qwen3")
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
