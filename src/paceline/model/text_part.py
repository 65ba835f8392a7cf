"""The text part of models that also read images: loaded alone, as the decoder that it is.

Its weights have other names in such checkpoints; those of the vision tower are not read.
"""

from __future__ import annotations

import re
from typing import Any

# Types whose text part computes what the decoder of its own type does.
_WITH_IMAGES = {"gemma3", "internvl", "llava", "mistral3"}
# Names in checkpoints, of older and of newer transformers, and those of the decoder.
_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "architectures")


def text_part(config: Any) -> Any:
    """The config of the decoder inside; a config of other types is returned as it is."""
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
    """Of ``kind.from_pretrained``; None for a class that has a text part of its own."""
    return _NAMES if kind.__name__.endswith("ForCausalLM") else None


def plain_name(name: str) -> str:
    """A layer's or tensor's name in the decoder; one that is no part of it keeps its own."""
    for pattern, plain in _NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, plain, name)
    return name
