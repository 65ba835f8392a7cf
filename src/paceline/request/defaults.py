"""How requests sample that do not say it: as the user set it, else as the checkpoint says.

the request's own --> the LLM's default_temperature ... --> generation_config.json --> neutral
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of ``SamplingParams``, with its bounds; None is left open. Raises ConfigError on a
    value out of range."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self.filled())

    @property
    def named(self) -> dict[str, Any]:
        """What is not left open."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, below: SamplingDefaults) -> SamplingDefaults:
        """These, and what they leave open from ``below``."""
        return SamplingDefaults(**(below.named | self.named))

    def filled(self) -> dict[str, Any]:
        """All of them. What is left open is neutral; the temperature is 0, but 1 where top_p, top_k
        or min_p truncate."""
        neutral = {item.name: getattr(SamplingParams, item.name) for item in fields(self)}
        filled = neutral | self.named
        if self.temperature is None and (
            filled["top_p"] < 1 or filled["top_k"] > 0 or filled["min_p"] > 0
        ):
            filled["temperature"] = 1.0
        return filled


def of_checkpoint(generation: Any, model: str) -> SamplingDefaults:
    """What a ``generation_config`` of transformers, or None, says of sampling. ``do_sample`` true
    is temperature 1 if none is named, false is greedy. Raises ConfigError, naming the ``model``."""
    names = [item.name for item in fields(SamplingDefaults)]
    settings = {name: getattr(generation, name, None) for name in names}
    samples = getattr(generation, "do_sample", None)
    if samples is False:
        settings["temperature"] = 0.0
    elif samples and settings["temperature"] is None:
        settings["temperature"] = 1.0
    try:
        return SamplingDefaults(**settings)
    except ConfigError as error:
        raise ConfigError(
            f"the generation config of {model}: {error}; leave it out with generation_config 'none'"
        ) from None


def sampling_defaults(settings: dict[str, Any], generation: Any, model: str) -> SamplingDefaults:
    """An engine's ``settings`` (``default_temperature`` ...) over its checkpoint's. Raises
    ConfigError."""
    try:
        overrides = SamplingDefaults(
            **{item.name: settings[f"default_{item.name}"] for item in fields(SamplingDefaults)}
        )
    except ConfigError as error:
        raise ConfigError(f"default_{error}") from None
    source = settings["generation_config"]
    if source not in ("auto", "none"):
        raise ConfigError(f"generation_config is {source!r}; use one of auto, none")
    return overrides if source == "none" else overrides.over(of_checkpoint(generation, model))
