"""The text part of multimodal models, which is loaded alone, as a decoder.

Its weights have other names in such checkpoints; the vision tower's weights are not read.
"""

from __future__ import annotations

import re
from typing import Any

# Model types whose text part is a decoder that transformers also has as a model of its own.
_WITH_IMAGES = {"gemma3", "internvl", "llava", "mistral3"}
# Prefixes of names in checkpoints, of older and newer transformers, and those of the decoder.
_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "architectures")


def text_part(config: Any) -> Any:
    """The config of a multimodal model's decoder; other configs are returned unchanged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if config.model_type not in _WITH_IMAGES or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    for name in _OF_THE_WHOLE:
        if hasattr(config, name):
            setattr(text, name, getattr(config, name))
    text.dtype = text.dtype or config.dtype
    return text


def key_mapping(kind: Any) -> dict[str, str] | None:
    """The ``key_mapping`` for ``kind.from_pretrained``; None for classes that have a text part."""
    whole = "text_config" in kind.config_class.sub_configs  # Fuyu's
    return None if whole or not kind.__name__.endswith("ForCausalLM") else _NAMES


def plain_name(name: str) -> str:
    """A layer's or tensor's name in the decoder; names of other parts are returned unchanged."""
    for pattern, plain in _NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, plain, name)
    return name
