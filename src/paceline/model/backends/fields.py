"""Which fields of a configuration the quick forwards know, by architecture.

A recogniser compares structure and results, but a result is compared at few positions and with few
values. So a field counts as well: one that is set, that the architecture's own code reads and that
no table here names may do what the quick forward leaves out.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

# Shapes; what results of layers, masks and rotary tables show; what concerns training, outputs or
# the file. What is in ``rope_parameters`` is looked at below.
_FIELDS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings tie_word_embeddings
    hidden_act hidden_activation rms_norm_eps attention_bias attention_out_bias mlp_bias use_bias
    bias qkv_bias
    sliding_window use_sliding_window max_window_layers layer_types sliding_window_pattern
    _sliding_window_pattern
    rope_parameters rope_scaling rope_theta rope_local_base_freq partial_rotary_factor default_theta
    initializer_range attention_dropout residual_dropout hidden_dropout output_router_logits
    router_aux_loss_coef router_jitter_noise pretraining_tp problem_type id2label label2id
    bos_token_id eos_token_id pad_token_id use_cache return_dict output_attentions
    output_hidden_states chunk_size_feed_forward is_encoder_decoder
    _name_or_path architectures auto_map dtype torch_dtype model_type transformers_version
    quantization_config _attn_implementation
"""
_EVERYWHERE = frozenset(_FIELDS.split())
_GEMMA = {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}
_BY_ARCHITECTURE: Mapping[str, set[str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "mixtral": {"num_local_experts", "num_experts_per_tok"},
}
# Granite's, of which 1 changes nothing; that of attention is its scaling, which is read.
_FACTORS = {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"}
_ROPE = """
    rope_type type rope_theta factor original_max_position_embeddings max_position_embeddings
    partial_rotary_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
    low_freq_factor high_freq_factor short_factor long_factor
"""
_IN_ROPE = frozenset(_ROPE.split())


def unknown_field(hf: Any) -> str | None:
    """The first field of a model's configuration that is set, read and not known, with its value;
    None if there is none."""
    config = hf.config.get_text_config(decoder=True)
    known = _EVERYWHERE | _BY_ARCHITECTURE.get(config.model_type, set())
    fields = config.to_dict()
    strange = [(name, value) for name, value in fields.items() if name not in known]
    strange += _rope_fields(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    source = _source(frozenset(type(module).__module__ for module in hf.modules()))
    for name, value in strange:  # zero, False, None and what is empty ask for nothing
        if value == 1.0 and name in _FACTORS:
            continue
        if value and (source is None or re.search(rf"\b{re.escape(name)}\b", source)):
            return f"{name} = {value}"
    return None


def _rope_fields(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a rotary embedding that are not known; it may have one for each kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _rope_fields(value)
        elif name not in _IN_ROPE:
            yield name, value


@lru_cache(maxsize=16)
def _source(modules: frozenset[str]) -> str | None:
    """The code that a model's modules are from; None if some of it cannot be read.

    A field that it does not name is not read by it: training scripts leave many in a config.
    """
    ours = [name for name in modules if name.split(".")[0] not in ("torch", "paceline")]
    try:
        return "\n".join(inspect.getsource(sys.modules[name]) for name in sorted(ours))
    except (KeyError, OSError, TypeError):
        return None
