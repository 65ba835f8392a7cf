"""From a configuration to a loaded model or, where no model is held, its tokenizer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.cli.options import set_threads
from paceline.cli.output import quiet_libraries
from paceline.settings import explicit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline import LLM
    from paceline.server.config import ServeConfig


def load_llm(config: ServeConfig) -> LLM:
    """Raises what ``LLM`` does."""
    quiet_libraries()
    set_threads(config.threads)
    from paceline import LLM

    settings = explicit(vars(config), "LLM")
    return LLM(config.model, config.drafts, profile=config.profile, **settings)


def load_tokenizer_alone(config: ServeConfig) -> PreTrainedTokenizerFast:
    """The same tokenizer as the model's, without torch: in a second, and in a tenth of the memory.

    Raises ModelLoadError.
    """
    from paceline.model.gguf import gguf_file
    from paceline.model.names import resolve

    # (Of a GGUF file transformers reads a tokenizer only where there is a torch.)
    if "torch" not in sys.modules and gguf_file(resolve(config.model)) is None:
        # transformers imports torch wherever it finds it, though its tokenizers have no use for it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    quiet_libraries()
    from paceline.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)
