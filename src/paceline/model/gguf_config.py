"""Metadata of a GGUF file that transformers ignores.

transformers reads the sizes, and leaves the rest at the architecture's defaults: RoPE scaling, its
factor tensors, windows, soft caps, scales. Here every key of the architecture is either read into
the config or refused by name.

======================================  =======================================================
key, without the architecture's name    goes to
======================================  =======================================================
``rope.freq_base``, ``_swa``            ``rope_theta``, of sliding layers
``rope.scaling.*``                      ``rope_parameters``: linear, yarn, longrope
tensor ``rope_freqs``                   ``rope_parameters``: llama3, if it equals its factors
tensors ``rope_factors_long, _short``   ``rope_parameters``: longrope
``rope.dimension_count``                ``partial_rotary_factor``
``attention.sliding_window``            ``sliding_window``
``attention.sliding_window_pattern``    ``layer_types``
``attention.scale``                     ``query_pre_attn_scalar``; implied for Gemma's 27B
======================================  =======================================================

(The keys are from gguf-py's constants, their meaning from llama.cpp's conversion scripts and
hyperparameters.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline.errors import UnsupportedModelError
from paceline.model.gguf import GgufFile

# Keys that do not matter here.
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# Features that are not implemented for GGUF: the only values allowed.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
}
# Numbers that transformers does not read, and the names that they may have in a config.
_NUMBERS = {
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
_WINDOWED = {"phi3", "starcoder2"}  # the same window in all layers; Gemma has layer_types
_GEMMA = {"gemma2", "gemma3"}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # llama.cpp, too, recognises the 27B models by these
_YARN = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192  # assumed by llama.cpp's converter


def complete_config(config: Any, file: GgufFile) -> Any:
    """Complete ``config``, which transformers read from ``file``, by the keys that it ignored.
    Raises UnsupportedModelError, naming the key, for a key or value that is not implemented."""
    keys = _Keys(file)
    changes = _numbers(config, keys) | _attention(config, keys)
    if getattr(config, "rope_parameters", None):
        changes["rope_parameters"] = _rope(config, keys)
    original = keys.values.get("rope.scaling.original_context_length")
    if original and hasattr(config, _ORIGINAL):
        changes[_ORIGINAL] = int(original)
    for key, allowed in _ABSENT.items():
        keys.expect(key, *allowed)
    if keys.unread:
        keys.refuse(min(keys.unread))
    return type(config).from_dict({**config.to_dict(), **changes})


class _Keys:
    """The keys of a file's architecture, without its name. ``unread``: the keys that nobody has
    read so far; those left at the end are refused."""

    def __init__(self, file: GgufFile) -> None:
        from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

        self.file = file
        self.architecture = file.architecture
        start = f"{file.architecture}."
        fields = file.fields.items()
        self.values: dict[str, Any] = {
            key.removeprefix(start): value for key, value in fields if key.startswith(start)
        }
        taken = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(file.architecture, {})
        single = {key for key, value in self.values.items() if not isinstance(value, list)}
        self.unread = set(self.values) - _HARMLESS
        self.unread -= {key for key, name in taken.items() if name is not None} & single

    def take(self, key: str) -> Any:
        """The value or None; marks the key as read."""
        self.unread.discard(key)
        return self.values.get(key)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse the file if the key has another value than these; it may be absent."""
        value = self.take(key)
        if value is not None and not any(_equal(value, other) for other in allowed):
            self.refuse(key)

    def width(self, config: Any) -> int:
        """The width of an attention head."""
        width = self.values.get("attention.key_length") or getattr(config, "head_dim", None)
        return int(width or config.hidden_size // config.num_attention_heads)

    def refuse(self, key: str, why: str = "is not read here") -> NoReturn:
        """Raise UnsupportedModelError; ``key`` names a key of the architecture or a tensor."""
        what = f"sets {self.architecture}.{key} to {self.values.get(key)}, which"
        if key in self.file.rope_factors:
            what = f"holds the tensor {key},"
        raise UnsupportedModelError(
            f"{self.file.path} {what} {why}; take the model's own folder (safetensors) in place of "
            "its GGUF file"
        )


def _numbers(config: Any, keys: _Keys) -> dict[str, Any]:
    """Sizes and caps that transformers does not read, as changes of the config."""
    changes: dict[str, Any] = {}
    for key, names in _NUMBERS.items():
        value = keys.values.get(key)
        name = next((name for name in names if hasattr(config, name)), None)
        if value is not None and name is not None:
            changes[name] = keys.take(key)
    width = changes.get("head_dim") or config.hidden_size // config.num_attention_heads
    keys.expect("attention.key_length", width)
    keys.expect("attention.value_length", keys.width(config))
    if keys.architecture == "gpt2":
        changes["n_positions"] = keys.take("context_length")
        changes["n_inner"] = keys.take("feed_forward_length")
        keys.expect("attention.head_count_kv", config.n_head)
    return changes


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal in float32, in which files store numbers."""
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def _attention(config: Any, keys: _Keys) -> dict[str, Any]:
    """Sliding windows, and the scaling of attention scores, as changes of the config."""
    context = keys.values.get("context_length") or config.max_position_embeddings
    window = keys.take("attention.sliding_window")
    if keys.architecture not in _GEMMA:
        keys.expect("attention.scale", 0.0, keys.width(config) ** -0.5)
        if keys.architecture in _WINDOWED:
            return {"sliding_window": window or None}
        if window and window < context:
            keys.refuse("attention.sliding_window", "this architecture does not have elsewhere")
        return {}
    layers, changes = config.num_hidden_layers, {}
    pattern = keys.take("attention.sliding_window_pattern")
    if keys.architecture == "gemma3" and not window:
        pattern = 1
    if pattern is not None:
        slides = pattern
        if not isinstance(pattern, list):
            slides = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(layers)]
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
        changes["layer_types"] = kinds[:layers]
    scale = keys.take("attention.scale")
    scalar = round(scale**-2) if scale else keys.values.get("attention.key_length")
    if not scale and layers == _LAYERS_OF_27B[keys.architecture]:
        scalar = config.hidden_size // config.num_attention_heads
    return changes | {"query_pre_attn_scalar": scalar or config.query_pre_attn_scalar}


def _rope(config: Any, keys: _Keys) -> dict[str, Any]:
    """The completed ``rope_parameters``; by layer type where they were so before."""
    parameters = config.rope_parameters
    sliding = parameters.get("sliding_attention")
    options = dict(parameters["full_attention"] if sliding else parameters)
    base, swa = keys.take("rope.freq_base"), keys.take("rope.freq_base_swa")
    options["rope_theta"] = options["rope_theta"] if base is None else base
    rotated, width = keys.take("rope.dimension_count"), keys.width(config)
    if rotated is not None and "partial_rotary_factor" in options:
        options["partial_rotary_factor"] = rotated / width
    elif rotated not in (None, width):
        keys.refuse("rope.dimension_count", f"rotates a part of heads of {width} only")
    options |= _scaling(config, keys, options)
    if sliding:
        slow = {**sliding, "rope_theta": sliding["rope_theta"] if swa is None else swa}
        return {"sliding_attention": slow, "full_attention": options}
    if swa not in (None, options["rope_theta"]):
        keys.refuse("rope.freq_base_swa")
    return options


def _scaling(config: Any, keys: _Keys, options: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE scaling, as entries of ``rope_parameters``; empty without scaling."""
    kind = keys.take("rope.scaling.type")
    factor = keys.take("rope.scaling.factor") or keys.take("rope.scale_linear") or 1.0
    original = keys.take("rope.scaling.original_context_length") or config.max_position_embeddings
    factors, unscaled = keys.file.rope_factors, {_ORIGINAL: int(original)}
    if kind is None:
        long = any(name.startswith("rope_factors") for name in factors)
        kind = "longrope" if long else "linear"
    if "rope_freqs.weight" in factors:
        if factor != 1 and kind != "none":
            keys.refuse("rope_freqs.weight", f"beside rope scaling of the type {kind}")
        return _llama3(config, keys, options)
    if kind == "longrope":
        return _longrope(keys) | unscaled
    if factors:
        keys.refuse(min(factors), f"beside rope scaling of the type {kind}")
    keys.expect("rope.scaling.attn_factor", 0.0, 1.0)
    if kind == "yarn":
        keys.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        keys.expect("rope.scaling.yarn_log_multiplier", 0.0)
        values = {name: keys.take(f"rope.scaling.yarn_{key}") for name, key in _YARN.items()}
        stated = {name: float(value) for name, value in values.items() if value and value > 0}
        return {"rope_type": "yarn", "factor": factor, **unscaled, **stated}
    if kind not in ("linear", "none"):
        keys.refuse("rope.scaling.type")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _longrope(keys: _Keys) -> dict[str, Any]:
    options: dict[str, Any] = {"rope_type": "longrope"}
    for length in ("short", "long"):
        factors = keys.file.rope_factors.get(f"rope_factors_{length}.weight")
        if factors is None:
            keys.refuse("rope.scaling.type", "needs both tensors rope_factors_long and _short")
        options[f"{length}_factor"] = list(factors)
    attention_factor = keys.take("rope.scaling.attn_factor")
    return options | ({"attention_factor": float(attention_factor)} if attention_factor else {})


def _llama3(config: Any, keys: _Keys, options: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 options from which llama.cpp's converter computed the tensor of factors. Refuses
    the file if they give other factors."""
    factors = keys.file.rope_factors["rope_freqs.weight"]
    factor = max(factors)
    if factor == min(factors) == 1:
        return {}
    wanted = _llama3_factors(options["rope_theta"], 2 * len(factors), factor)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, wanted, strict=True)):
        keys.refuse("rope_freqs.weight", "whose factors are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3, _ORIGINAL: _LLAMA3_CONTEXT}


def _llama3_factors(theta: float, width: int, factor: float) -> Sequence[float]:
    """The factors by which Llama 3 divides the RoPE frequencies of a head of width ``width``."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    factors = []
    for pair in range(width // 2):
        turns = _LLAMA3_CONTEXT * theta ** (-2 * pair / width) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return factors
