"""The ``speculators`` config of an EAGLE-3 head, which vLLM loads, to and from the flat one.

The project ``vllm-project/speculators`` nests the decoder layer's options and adds how the head is
to be used; the tensors beside it are those of EAGLE-3, the layer under ``layers.0``. Read from its
published configs (versions 0.1 to 0.5)::

    {"speculators_model_type": "eagle3", "draft_vocab_size": ..., "norm_before_residual": ...,
     "target_hidden_size": ..., "eagle_aux_hidden_state_layer_ids": [...],
     "transformer_layer_config": {"model_type": "llama", "hidden_size": ..., ...},
     "speculators_config": {"algorithm": "eagle3", "proposal_methods": [...], "verifier": {...}}}
"""

from __future__ import annotations

from typing import Any

from paceline.errors import ModelLoadError

_TYPE = "speculators_model_type"
# What an absent key of the nested config means: its writer leaves out what equals these.
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
_OUTER = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_fc",
    "paceline_target_layers",
)
DRAFTED_TOKENS = 4  # proposed per step by engines that go by the config


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is in this format."""
    return _TYPE in config


def from_speculators(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The flat options of an EAGLE-3 head. Raises ModelLoadError, naming the folder ``name``."""
    kind = config[_TYPE]
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


def to_speculators(
    flat: dict[str, Any], verifier: str | None, architectures: tuple[str, ...]
) -> dict[str, Any]:
    """The nested config of flat options.

    ``verifier`` is the target's name or path, ``architectures`` its classes in transformers.
    """
    outer = {key: flat[key] for key in (*_OUTER, "norm_before_residual") if key in flat}
    left_out = {*outer, "architectures", "tie_word_embeddings"}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED_TOKENS,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        _TYPE: "eagle3",
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
