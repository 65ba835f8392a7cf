"""All of ``model.generate``, for ``custom_generate/generate.py`` in a folder or on the hub.

A function named by a folder gets every argument of ``model.generate``; one that is given as an
object gets neither the tokenizer nor, in transformers 5.17 to 5.23, the streamer.
"""

from __future__ import annotations

from typing import Any

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerationMixin

from paceline.errors import ConfigError
from paceline.integrations.transformers.decode import generate


def generate_whole(
    model: Any, inputs: Any = None, tokenizer: Any = None, streamer: Any = None, **kwargs: Any
) -> Any:
    """``model.generate(inputs, ...)`` with our decoding; arguments, result and errors as of
    ``generate``, and ``stop_strings`` with ``tokenizer``."""
    stops = kwargs.pop("stop_strings", None)
    if stops is not None:
        if tokenizer is None:
            raise ConfigError("stop_strings need the tokenizer; give tokenizer=...")
        own = kwargs.pop("stopping_criteria", None) or ()
        added = StopStringCriteria(tokenizer, stops)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*own, added])
    if tokenizer is not None:
        kwargs.setdefault("target_tokenizer", tokenizer)
    # Not model.generate, which is this function where a model's own folder has one.
    return GenerationMixin.generate(
        model, inputs, custom_generate=generate, streamer=streamer, **kwargs
    )
