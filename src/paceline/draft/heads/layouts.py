"""What the public layouts of EAGLE heads and block drafters share: options of config.json, layers,
draft vocabulary, and the nested config of ``vllm-project/speculators`` (versions 0.1 to 0.5)::

    {"speculators_model_type": "eagle3", "draft_vocab_size": ..., "norm_before_residual": ...,
     "target_hidden_size": ..., "eagle_aux_hidden_state_layer_ids": [...],
     "transformer_layer_config": {"model_type": "llama", "hidden_size": ..., ...},
     "speculators_config": {"algorithm": "eagle3", "proposal_methods": [...], "verifier": {...}}}
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.draft.heads.checkpoint import Checkpoint
from paceline.draft.heads.network import SIZES, HeadConfig
from paceline.draft.spec import Target
from paceline.errors import ModelLoadError

WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "pytorch_model.bin")
_SPECULATORS = "speculators_model_type"
# Copies of the target's weights and tables that follow from the config.
_COPIES = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_BY_TOKEN = ("lm_head.weight", "markov_head.markov_w2.weight")  # a row for each drafted token
Tensors = dict[str, torch.Tensor]


def plain_names(checkpoint: Checkpoint) -> Tensors:
    """The tensors without a prefix, and without copies of the target's."""
    tensors = {key.removeprefix("model."): value for key, value in checkpoint.tensors.items()}
    return {key: value for key, value in tensors.items() if not key.endswith(_COPIES)}


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is of the speculators library."""
    return _SPECULATORS in config


def from_speculators(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The options of its config in one level. Raises ModelLoadError, naming the folder."""
    from transformers import AutoConfig

    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelLoadError(
            f"the config.json of {name} has no transformer_layer_config, which a speculators "
            "checkpoint must have; copy the file again"
        )
    try:  # it leaves out what is the default of its kind
        flat: dict[str, Any] = AutoConfig.for_model(**{"model_type": "llama", **layer}).to_dict()
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the transformer_layer_config of {name} cannot be read ({error}); "
            "copy config.json again"
        ) from None
    return flat | {key: value for key, value in config.items() if value is not None}


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


def shape_of(
    name: str, flat: dict[str, Any], tensors: Tensors, target: Target, layers: Any
) -> dict[str, Any]:
    """The fields of HeadConfig by options and tensors; ``layers``: the feature layers, as stated.
    Raises ModelLoadError."""
    hidden, heads = (whole(name, flat, key) for key in ("hidden_size", "num_attention_heads"))
    flat = {
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "max_position_embeddings": 2048,
        **{key: value for key, value in flat.items() if value is not None},
    }
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise ModelLoadError(
            f"the layers that {name} reads are {layers!r}, not a list of layer numbers"
        )
    options = dict(flat.get("rope_parameters") or flat.get("rope_scaling") or {})  # new, old form
    theta = float(options.pop("rope_theta", None) or flat.get("rope_theta") or 10000.0)
    kind = options.pop("type", None)
    options.setdefault("rope_type", kind or "default")
    return {
        **{field: whole(name, flat, key) for key, field in SIZES.items()},
        "target_layers": target.num_layers,
        "feature_layers": tuple(layers),
        "rope_theta": theta,
        "rope_scaling": None if options["rope_type"] == "default" else options,
        "rms_norm_eps": float(flat.get("rms_norm_eps", 1e-6)),
        "attention_bias": any(key.endswith("q_proj.bias") for key in tensors),
        "has_embedding": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
    }


def draft_ids(title: str, config: HeadConfig, tensors: Tensors) -> torch.Tensor:
    """The target ids of the draft vocabulary, ascending; sorts the tensors accordingly. Raises
    ModelLoadError."""
    count, vocab = config.columns, config.vocab_size
    offsets = tensors.get("d2t")
    if offsets is None and count != vocab:
        raise ModelLoadError(
            f"{title} drafts {count} of {vocab} tokens but has no d2t that says "
            "which; its weights are incomplete"
        )
    offsets = torch.zeros(vocab, dtype=torch.int64) if offsets is None else offsets
    if offsets.shape != (count,):
        raise ModelLoadError(
            f"d2t of {title} has shape {list(offsets.shape)}, but the config has a "
            f"draft vocabulary of {count}; the two files do not belong together"
        )
    ids, order = (offsets.to(torch.int64) + torch.arange(count)).sort()
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab or bool((ids.diff() == 0).any()):
        raise ModelLoadError(
            f"d2t of {title} does not name {count} different tokens below {vocab}; "
            "it must hold offsets (target id = i + d2t[i])"
        )
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    t2d = tensors.get("t2d")
    if t2d is not None and not (t2d.shape == (vocab,) and torch.equal(t2d.bool(), known)):
        raise ModelLoadError(f"t2d and d2t of {title} name different tokens; the file is damaged")
    for key in _BY_TOKEN:
        if key in tensors and tensors[key].shape[0] == count:
            tensors[key] = tensors[key][order]
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(count), known
    return ids


def flat_options(config: HeadConfig, layers: int = 1, kind: str = "llama") -> dict[str, Any]:
    """The options of config.json that all layouts have."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **{key: getattr(config, field) for key, field in SIZES.items()},
    }


def speculators_options(
    algorithm: str,
    architecture: str,
    layer: dict[str, Any],
    drafted: int,
    verifier: tuple[str | None, tuple[str, ...]],
) -> dict[str, Any]:
    """The nested config. ``drafted``: tokens a step for engines that go by it; ``verifier``: the
    target's name or path, and its classes in transformers."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafted}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    target, architectures = verifier
    return {
        "architectures": [architecture],
        _SPECULATORS: algorithm,
        "speculators_version": "0.5.0",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
    }
