"""Lossless speculative decoding of language models.

    from paceline import LLM, SamplingParams

    llm = LLM("paceline/tiny", draft="paceline/tiny-draft")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=60))[0].text)

Names are imported on first use, so that ``import paceline`` and ``paceline --help`` cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.control.cost import CostModel
    from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
    from paceline.core.params import Grammar, SamplingParams
    from paceline.engine.driver import Drive
    from paceline.errors import (
        CacheMemoryError,
        ConfigError,
        DataError,
        EngineLostError,
        ModelLoadError,
        PacelineError,
        PromptError,
        UnsupportedModelError,
        VocabularyMismatchError,
        WriteError,
    )
    from paceline.llm import LLM
    from paceline.model.backends.base import register_backend
    from paceline.request.completion import Completion

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheMemoryError",
    "Completion",
    "ConfigError",
    "CostCurve",
    "CostModel",
    "DataError",
    "DrafterCosts",
    "Drive",
    "EngineLostError",
    "Grammar",
    "ModelLoadError",
    "PacelineError",
    "PromptError",
    "SamplingParams",
    "TargetCosts",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "WriteError",
    "__version__",
    "register_backend",
]

_HOMES = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "Completion": "paceline.request.completion",
    "CostCurve": "paceline.core.costs",
    "CostModel": "paceline.control.cost",
    "DrafterCosts": "paceline.core.costs",
    "Drive": "paceline.engine.driver",
    "Grammar": "paceline.core.params",
    "SamplingParams": "paceline.core.params",
    "TargetCosts": "paceline.core.costs",
    "register_backend": "paceline.model.backends.base",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "paceline.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
