"""Read a tokenizer; it needs no torch, and neither does this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ModelLoadError
from paceline.model.names import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder. Raises ModelLoadError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelLoadError(
            f"no tokenizer in {name}: {reason}; put tokenizer.json beside the weights"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer of {name} is not a fast one (tokenizer.json); "
            "convert it with transformers' convert_slow_tokenizer and save it there"
        )
    return tokenizer
