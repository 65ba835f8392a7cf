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
    from paceline.async_llm import AsyncLLM as AsyncLLM
    from paceline.control.cost import CostModel as CostModel
    from paceline.core.costs import CostCurve as CostCurve
    from paceline.core.costs import DrafterCosts as DrafterCosts
    from paceline.core.costs import TargetCosts as TargetCosts
    from paceline.core.params import Grammar as Grammar
    from paceline.core.params import SamplingParams as SamplingParams
    from paceline.engine.driver import Drive as Drive
    from paceline.errors import CacheMemoryError as CacheMemoryError
    from paceline.errors import ConfigError as ConfigError
    from paceline.errors import DataError as DataError
    from paceline.errors import EngineLostError as EngineLostError
    from paceline.errors import ModelLoadError as ModelLoadError
    from paceline.errors import PacelineError as PacelineError
    from paceline.errors import PromptError as PromptError
    from paceline.errors import UnsupportedModelError as UnsupportedModelError
    from paceline.errors import VocabularyMismatchError as VocabularyMismatchError
    from paceline.errors import WriteError as WriteError
    from paceline.llm import LLM as LLM
    from paceline.model.backends.base import register_backend as register_backend
    from paceline.request.completion import Completion as Completion

__version__ = "0.2.0"

_BY_MODULE = {
    "async_llm": "AsyncLLM",
    "control.cost": "CostModel",
    "core.costs": "CostCurve DrafterCosts TargetCosts",
    "core.params": "Grammar SamplingParams",
    "engine.driver": "Drive",
    "errors": "CacheMemoryError ConfigError DataError EngineLostError ModelLoadError PacelineError "
    "PromptError UnsupportedModelError VocabularyMismatchError WriteError",
    "llm": "LLM",
    "model.backends.base": "register_backend",
    "request.completion": "Completion",
}
_HOMES = {name: f"paceline.{home}" for home, names in _BY_MODULE.items() for name in names.split()}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
