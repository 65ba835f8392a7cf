"""EAGLE checkpoints in their public layouts, read and written.

A folder with config.json and model.safetensors (or pytorch_model.bin, read without running code):

=================  ====================================================================
EAGLE-3            ``midlayer.*`` (attention input 2H), ``fc.weight [H, 3 H_target]``, ``norm``,
                   ``lm_head [draft vocabulary, H]``, ``d2t`` int64 offsets (target id = i +
                   d2t[i]), ``t2d`` bool, ``embed_tokens`` or else the target's
EAGLE-1, EAGLE-2   ``fc.weight [H, 2H]``, ``layers.0.*`` without an input norm, ``embed_tokens``
                   or else the target's; the target's head makes the logits
speculators        EAGLE-3 with its layer under ``layers.0`` and a nested config, below
=================  ====================================================================

``eagle_aux_hidden_state_layer_ids`` (also under ``eagle_config``) are layers whose INPUTS the head
reads, as vLLM takes them. Heads made for SGLang count outputs, one less: give ``feature_layers``.

The config of ``vllm-project/speculators``, as its published ones have it (versions 0.1 to 0.5)::

    {"speculators_model_type": "eagle3", "draft_vocab_size": ..., "norm_before_residual": ...,
     "target_hidden_size": ..., "eagle_aux_hidden_state_layer_ids": [...],
     "transformer_layer_config": {"model_type": "llama", "hidden_size": ..., ...},
     "speculators_config": {"algorithm": "eagle3", "proposal_methods": [...], "verifier": {...}}}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.draft.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.draft.heads.eagle_head import SIZES, EagleConfig, EagleHead, default_feature_layers
from paceline.draft.spec import Target
from paceline.errors import ConfigError, ModelLoadError

WEIGHTS = "model.safetensors"
_KIND = "EAGLE head"
LAYOUTS = ("eagle", "speculators")
FILES = (WEIGHTS, "pytorch_model.bin")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TARGET_LAYERS = "paceline_target_layers"  # no published option has the target's depth
_SPECULATORS = "speculators_model_type"
# Of EAGLE-3 alone, as SIZES.
_SIZES_3 = {"target_hidden_size": "target_hidden_size", "draft_vocab_size": "draft_vocab_size"}
_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "norm_before_fc": False}
# Defaults of the nested config: its writer leaves out equal values.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_OUTER = ("draft_vocab_size", "target_hidden_size", _LAYERS, "norm_before_fc", _TARGET_LAYERS)
# Copies of the target's weights and tables that follow from the config.
_COPIES = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
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
    checkpoint = read_checkpoint(source, FILES, _KIND) if isinstance(source, str) else source
    name = checkpoint.name
    tensors = _public_names(checkpoint)
    eagle_version = 3 if "midlayer.hidden_norm.weight" in tensors or "d2t" in tensors else 1
    if version is not None and version != eagle_version:
        raise ModelLoadError(
            f"{name} is an EAGLE-{eagle_version} head, not EAGLE-{version}; "
            f"use --draft {'eagle3' if eagle_version == 3 else 'eagle'}:{name}"
        )
    stated = checkpoint.config
    flat = _from_speculators(name, stated) if is_speculators(stated) else stated
    if feature_layers is not None:
        flat = flat | {_LAYERS: list(feature_layers)}
    config = _config(checkpoint, flat, tensors, target, eagle_version)
    ids = _vocabulary(name, config, tensors) if eagle_version == 3 else None
    try:
        with tensors["fc.weight"].device:
            head = EagleHead(config, ids, target_head)
    except (KeyError, TypeError, ValueError):
        raise ModelLoadError(
            f"the config.json of {name} has rope_scaling {config.rope_scaling}, which the "
            "installed transformers does not know or which is incomplete"
        ) from None
    checkpoint.check_shapes(_KIND, head, tensors)
    head.load_state_dict(tensors)
    return head.to(tensors["fc.weight"].dtype)


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
    flat, tensors = _flat_options(head.config), dict(head.state_dict())
    if layout == "eagle":
        write_checkpoint(folder, WEIGHTS, tensors, flat)
        return
    config = head.config
    if config.version != 3 or config.fc_bias or len(config.feature_layers) != 3:
        raise ConfigError(
            "the speculators layout holds EAGLE-3 heads of three feature layers without a bias in "
            'fc; write this one with layout "eagle"'
        )
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
    nested = _to_speculators(flat, target_name, target_architectures)
    write_checkpoint(folder, WEIGHTS, renamed, nested)


# -- reading ---------------------------------------------------------------------------------


def _public_names(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors under EagleHead's names. Raises ModelLoadError if they are not an EAGLE
    head's."""
    tensors = {key.removeprefix("model."): value for key, value in checkpoint.tensors.items()}
    tensors = {key: value for key, value in tensors.items() if not key.endswith(_COPIES)}
    if "fc.weight" not in tensors:
        raise checkpoint.another_kind(_KIND)
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {key.replace("layers.0.", "midlayer."): v for key, v in tensors.items()}
    if "midlayer.hidden_norm.weight" not in tensors and "d2t" not in tensors:
        tensors.pop("lm_head.weight", None)  # EAGLE-1 drafts with the target's: a copy of it
    return tensors


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is of the speculators library."""
    return _SPECULATORS in config


def _from_speculators(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The flat options of an EAGLE-3 head. Raises ModelLoadError, naming the folder."""
    kind = config[_SPECULATORS]
    if kind != "eagle3":
        raise ModelLoadError(
            f"{name} is a speculators checkpoint of type {kind!r}; of that format only eagle3 "
            "can be loaded here"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelLoadError(
            f"the config.json of {name} has no transformer_layer_config, which a speculators "
            "checkpoint must have; copy the file again"
        )
    flat = _LLAMA_DEFAULTS | layer
    flat |= {key: config[key] for key in _OUTER if config.get(key) is not None}
    # vLLM takes an absent option as true; the library itself always writes it.
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    return flat


def whole(name: str, flat: dict[str, Any], key: str) -> int:
    """A whole number above 0 from the config."""
    value = flat.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problem = "has no" if value is None else f"has {value!r} for"
        raise ModelLoadError(
            f"the config.json of {name} {problem} {key}, a whole number above 0; "
            "copy the file again"
        )
    return value


def _config(
    checkpoint: Checkpoint,
    flat: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: Target,
    version: int,
) -> EagleConfig:
    """The head's shape by config and tensors, checked against the target."""
    name = checkpoint.name
    needed = "hidden_size", "num_attention_heads", "vocab_size"
    hidden, heads, vocab = (whole(name, flat, key) for key in needed)
    d2t = tensors.get("d2t")
    flat = {
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "max_position_embeddings": 2048,
        "target_hidden_size": hidden,
        "draft_vocab_size": vocab if d2t is None else max(1, d2t.numel()),
        **{key: value for key, value in flat.items() if value is not None},
    }
    sizes = {field: whole(name, flat, key) for key, field in (SIZES | _SIZES_3).items()}
    if version == 1:
        sizes["draft_vocab_size"] = vocab
    width = sizes["target_hidden_size"]
    checkpoint.check_target(_KIND, target, width, vocab, flat.get(_TARGET_LAYERS))
    for key, known in _ONLY.items():
        if flat.get(key) not in (None, known):  # it would load, but draft wrongly
            raise ModelLoadError(
                f"the EAGLE head {name} has {key} {flat[key]!r}; only {known!r} is supported"
            )
    has_embedding = "embed_tokens.weight" in tensors
    if not has_embedding and hidden != width:
        raise ModelLoadError(
            f"the EAGLE head {name} is {hidden} wide and has no embed_tokens, but the target's "
            f"embedding is {width} wide; its weights are incomplete"
        )
    layers = stated_layers(flat) or list(default_feature_layers(version, target.num_layers))
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise ModelLoadError(f"{_LAYERS} of {name} is {layers!r}, not a list of layer numbers")
    theta, scaling = rotary(flat)
    try:
        return EagleConfig(
            version=version,
            **sizes,
            target_layers=target.num_layers,
            feature_layers=tuple(layers),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
            attention_bias=any("q_proj.bias" in key for key in tensors),
            fc_bias="fc.bias" in tensors,
            norm_before_residual=bool(flat.get("norm_before_residual", False)),
            has_embedding=has_embedding,
            has_lm_head="lm_head.weight" in tensors or version == 1,
        )
    except ConfigError as error:
        raise ModelLoadError(f"the EAGLE head {name} does not fit the target: {error}") from None


def rotary(flat: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary embedding, in old and new transformers' form."""
    options = dict(flat.get("rope_parameters") or flat.get("rope_scaling") or {})
    theta = float(options.pop("rope_theta", None) or flat.get("rope_theta") or 10000.0)
    kind = options.pop("type", None)
    options.setdefault("rope_type", kind or "default")
    return theta, None if options["rope_type"] == "default" else options


def stated_layers(config: dict[str, Any]) -> Any:
    """The feature layers named in a config.json, in either form; empty or None for none."""
    nested = config.get("eagle_config")
    return config.get(_LAYERS) or (nested.get(_LAYERS) if isinstance(nested, dict) else None)


def _vocabulary(name: str, config: EagleConfig, tensors: dict[str, torch.Tensor]) -> list[int]:
    """The target ids of the draft vocabulary, ascending; sorts the tensors accordingly."""
    count, vocab = config.draft_vocab_size, config.vocab_size
    offsets = tensors.get("d2t")
    if offsets is None and count != vocab:
        raise ModelLoadError(
            f"the EAGLE head {name} drafts {count} of {vocab} tokens but has no d2t that says "
            "which; its weights are incomplete"
        )
    offsets = torch.zeros(vocab, dtype=torch.int64) if offsets is None else offsets
    if offsets.shape != (count,):
        raise ModelLoadError(
            f"d2t of the EAGLE head {name} has shape {list(offsets.shape)}, but the config has a "
            f"draft vocabulary of {count}; the two files do not belong together"
        )
    ordered, order = (offsets.to(torch.int64) + torch.arange(count)).sort()
    if int(ordered[0]) < 0 or int(ordered[-1]) >= vocab or bool((ordered.diff() == 0).any()):
        raise ModelLoadError(
            f"d2t of the EAGLE head {name} does not name {count} different tokens below {vocab}; "
            "it must hold offsets (target id = i + d2t[i])"
        )
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ordered] = True
    t2d = tensors.get("t2d")
    if t2d is not None and not (t2d.shape == (vocab,) and torch.equal(t2d.bool(), known)):
        raise ModelLoadError(
            f"t2d and d2t of the EAGLE head {name} name different tokens; the file is damaged"
        )
    if config.has_lm_head and tensors["lm_head.weight"].shape[0] == count:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"], tensors["t2d"] = ordered - torch.arange(count), known
    ids: list[int] = ordered.tolist()
    return ids


# -- writing ---------------------------------------------------------------------------------


def _flat_options(config: EagleConfig) -> dict[str, Any]:
    """The config.json of the authors' layout."""
    third = config.version == 3
    sizes = SIZES | _SIZES_3 if third else SIZES
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        _TARGET_LAYERS: config.target_layers,
        **{key: getattr(config, field) for key, field in sizes.items()},
    }
    if not third:
        return values | {"bias": config.fc_bias}
    residual = {"norm_before_residual": config.norm_before_residual}
    return values | residual | {_LAYERS: list(config.feature_layers)}


def _to_speculators(
    flat: dict[str, Any], verifier: str | None, architectures: tuple[str, ...]
) -> dict[str, Any]:
    """The nested config of flat options. ``verifier``: the target's name or path, ``architectures``
    its classes in transformers."""
    outer = {key: flat[key] for key in (*_OUTER, "norm_before_residual") if key in flat}
    left_out = {*outer, "architectures", "tie_word_embeddings"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": _DRAFTED_TOKENS}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        _SPECULATORS: "eagle3",
        "speculators_version": "0.5.0",
        "tie_word_embeddings": False,
        **outer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in left_out},
    }
