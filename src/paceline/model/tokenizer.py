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
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise ModelLoadError(
            f"no tokenizer in {name}: {first_line(error)}; put tokenizer.json beside the weights"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer of {name} is not a fast one (tokenizer.json); "
            "convert it with transformers' convert_slow_tokenizer and save it there"
        )
    return tokenizer


def first_line(error: BaseException) -> str:
    """The first line of a message, without the full stop."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
