"""Tiny GGUF files of several architectures, written on the spot as llama.cpp's converter would."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations import ggml

LAYERS, HIDDEN, HEADS, SHARED, WIDTH, FEED, CONTEXT = 2, 64, 4, 2, 16, 128, 256
CHAT = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
_SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FEED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "head_dim": WIDTH,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# GGUF's name of an architecture -> the class in transformers, and what it needs besides.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128}),  # as all of them; transformers takes it for granted
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": WIDTH}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": WIDTH}),
    "phi3": ("Phi3", {}),
    "starcoder2": ("Starcoder2", {"use_bias": True}),
    "gpt2": ("GPT2", {"n_inner": FEED}),
}
_TIED = {"gemma2", "gemma3"}  # these have no head of their own
_PLUS_ONE = {"gemma2", "gemma3"}  # llama.cpp stores their norms as they are applied


def skip_where_scores_are_needed(architecture: str) -> None:
    """Older versions of transformers read Gemma's vocabulary with scores only. Real files have
    them, those made here do not."""
    if architecture.startswith("gemma") and hasattr(ggml, "GGUFGemmaConverter"):
        pytest.skip("this transformers reads Gemma's vocabulary with scores only")


def make_module(
    architecture: str, vocabulary: int, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Any:
    """A random model; its weights are what the file must give back. ``options`` of its config."""
    import transformers

    family, more = ARCHITECTURES[architecture]
    text = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, f"{family}{text}")(
        **{
            **_COMMON,
            **more,
            "vocab_size": vocabulary,
            "tie_word_embeddings": architecture in _TIED,
            **(options or {}),
        }
    )
    torch.manual_seed(seed)
    module = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 / parameter.shape[-1] ** 0.5)
    return module.eval()


def byte_tokens() -> list[str]:
    """A byte-level vocabulary: the special tokens, every byte, and words of the merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*_SPECIAL, *bytes_to_unicode().values(), *(a + b for a, b in MERGES)]


MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("i", "n")]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    quantisation: str = "F32",
    pre: str = "qwen2",
    change: Callable[[Any], None] | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Write a file and return the module it was made of; ``change`` is given the writer."""
    import gguf

    module = make_module(architecture, len(byte_tokens()), seed, options)
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, architecture, module.config)
    _add_tokenizer(writer, pre)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, values in _renamed(architecture, module).items():
        if kind == gguf.GGMLQuantizationType.F32 or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def _describe(writer: Any, architecture: str, config: Any) -> None:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name("tiny")
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture not in ("llama", "phi3"):
        writer.add_key_length(width)
        writer.add_value_length(width)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _describe_rope(writer, architecture, config, width)


def _describe_rope(writer: Any, architecture: str, config: Any, width: int) -> None:
    """As llama.cpp's conversion scripts do."""
    import gguf

    options = config.rope_parameters
    options = options.get("full_attention") or options
    kind, factor = options["rope_type"], options.get("factor")
    writer.add_rope_freq_base(options["rope_theta"])
    writer.add_rope_dimension_count(int(width * options.get("partial_rotary_factor", 1.0)))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
    if kind == "yarn" or architecture == "phi3":
        original = options.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original or config.max_position_embeddings)
    if kind == "longrope":
        ratio = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(original)))
        for name in ("long", "short"):
            values = np.array(options[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = options["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        writer.add_tensor("rope_freqs.weight", (plain / stretched).numpy())


def _add_tokenizer(writer: Any, pre: str) -> None:
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _renamed(architecture: str, module: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Weights under GGUF's names, laid out as llama.cpp wants them."""
    import gguf

    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, module.config.num_hidden_layers)
    found = {}
    for name, value in module.state_dict().items():
        if name == "lm_head.weight" and architecture in _TIED:
            continue
        stem, _, suffix = name.rpartition(".")
        values = value.float().numpy().copy()
        if architecture == "llama" and stem.endswith((".q_proj", ".k_proj")):
            heads = HEADS if stem.endswith(".q_proj") else SHARED
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if architecture == "gpt2" and stem.endswith(("c_attn", "c_proj", "c_fc")):
            values = np.ascontiguousarray(values.T)  # transformers has them the other way round
        if architecture in _PLUS_ONE and stem.endswith("norm"):
            values = values + 1
        renamed = names.get_name(stem)
        assert renamed is not None, name
        found[f"{renamed}.{suffix}"] = values
    return found
