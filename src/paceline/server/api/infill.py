"""Filling in the middle: prompts of a text before and a text after what is to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.server.failures import APIError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The tokens before the prefix, before the suffix, and before the middle, as families write them;
# DeepSeek marks the hole instead and ends with the suffix.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def infill(tokenizer: PreTrainedTokenizerFast, prefix: list[int], suffix: str) -> list[int]:
    """The prompt that asks for what stands between ``prefix`` and ``suffix``. Raises APIError."""
    known = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in known for mark in marks):
            begin, hole, end = (known[mark] for mark in marks)
            after = tokenizer.encode(suffix, add_special_tokens=False)
            return [begin, *prefix, hole, *after, end]
    raise APIError(
        "suffix: this model's tokenizer has no tokens for filling in the middle; leave it out",
        param="suffix",
        code="unsupported_field",
    )
