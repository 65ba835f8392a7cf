"""Sampling parameters as command-line options, and the defaults of parameters that a request leaves
open. The first source that sets a parameter wins:

the request --> the LLM's default_temperature ... --> generation_config.json --> neutral values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.params import Grammar, SamplingParams
from paceline.errors import ConfigError
from paceline.settings import under


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of ``SamplingParams``; None leaves a parameter open. Raises ConfigError."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self.filled())

    @property
    def named(self) -> dict[str, Any]:
        """The parameters that are not left open."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, below: SamplingDefaults) -> SamplingDefaults:
        """These defaults, with those of ``below`` for parameters left open here."""
        return SamplingDefaults(**(below.named | self.named))

    def filled(self) -> dict[str, Any]:
        """Values of all parameters; open ones are neutral (temperature: 1 if others truncate)."""
        neutral = {item.name: getattr(SamplingParams, item.name) for item in fields(self)}
        filled = neutral | self.named
        if self.temperature is None and (
            filled["top_p"] < 1 or filled["top_k"] > 0 or filled["min_p"] > 0
        ):
            filled["temperature"] = 1.0
        return filled


def of_checkpoint(generation: Any, model: str) -> SamplingDefaults:
    """The sampling defaults in a ``generation_config`` of transformers (or None). ``do_sample``
    true means temperature 1 unless one is given, false greedy. Raises ConfigError."""
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
    """The defaults of an engine's ``settings`` (``default_top_p`` ...), then those of the
    checkpoint's generation config. Raises ConfigError."""
    try:
        overrides = SamplingDefaults(
            **{item.name: settings[f"default_{item.name}"] for item in fields(SamplingDefaults)}
        )
    except ConfigError as error:
        raise ConfigError(f"default_{error}") from None
    if settings["generation_config"] == "none":
        return overrides
    return overrides.over(of_checkpoint(generation, model))


_sampling = under("Sampling")
_of_model = partial(_sampling, None, shown="the model's")


@dataclass(frozen=True)
class DistributionOptions:
    """Options that shape a request's distribution. None takes the model's default."""

    temperature: float | None = _of_model(
        "Sampling temperature; 0 is greedy.", flags=("--temperature", "-t")
    )
    top_k: int | None = _of_model("Sample from the k likeliest tokens; 0 is off.")
    top_p: float | None = _of_model("Sample from the likeliest tokens of this total probability.")
    min_p: float | None = _of_model("Drop tokens below this share of the highest probability.")
    repetition_penalty: float | None = _of_model("Above 1 discourages repeats.")
    presence_penalty: float = _sampling(0.0, "Lowers the logits of tokens that occurred; -2 to 2.")
    frequency_penalty: float = _sampling(0.0, "Lowers logits per occurrence of a token; -2 to 2.")
    logit_bias: tuple[str, ...] = _sampling(
        (), "Add a value to a token's logit.", metavar="ID=VALUE"
    )

    def params(self, defaults: SamplingDefaults | None = None) -> SamplingParams:
        """The sampling parameters, with the model's ``defaults`` for options that are None. Raises
        ConfigError for a value out of range."""
        chosen = {item.name: vars(self)[item.name] for item in fields(SamplingDefaults)}
        filled = SamplingDefaults(**chosen).over(defaults or SamplingDefaults()).filled()
        values = vars(self) | filled
        values["logit_bias"] = parse_logit_bias(self.logit_bias)
        if values.get("grammar") is not None:
            values["grammar"] = parse_grammar(values["grammar"])
        return SamplingParams(**values)


@dataclass(frozen=True)
class SamplingOptions(DistributionOptions):
    """The options of one request."""

    max_tokens: int = _sampling(128, "Most new tokens.")
    min_tokens: int = _sampling(0, "Fewest new tokens.")
    seed: int | None = _sampling(
        None, "The same seed gives the same text, with any drafter.", shown="random"
    )
    stop: tuple[str, ...] = _sampling((), "Stop at this string.")
    stop_token_ids: tuple[int, ...] = _sampling(
        (), "Stop at this token id.", flags=("--stop-token-id",)
    )
    ignore_eos: bool = _sampling(False, "Continue after end-of-sequence tokens.")
    logprobs: int | None = _sampling(None, "With --json: log probabilities of this many tokens.")
    grammar: str | None = _sampling(
        None,
        "Grammar that the text must follow: json, json:SCHEMA, regex:..., lark:..., KIND:@FILE.",
        metavar="KIND:TEXT",
    )
    skip_special_tokens: bool = _sampling(True, "Leave special tokens out of the text.")
    receipt: bool = _sampling(False, "With --json: add a receipt for `paceline replay`.")
    n: int = _sampling(1, "Completions per prompt.", flags=("--n",))


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Parse biases written as ID=VALUE. Raises ConfigError."""
    split = (pair.partition("=") for pair in pairs)
    try:
        return {int(token): float(value) for token, _, value in split}
    except ValueError:
        raise ConfigError(f"--logit-bias {' '.join(pairs)}: write ID=VALUE, as in 42=-5") from None


def parse_grammar(text: str) -> Grammar:
    """Parse ``json``, ``KIND:TEXT`` or ``KIND:@FILE``. Raises ConfigError."""
    kind, colon, body = text.partition(":")
    if text == "json":
        return Grammar.json()
    if not colon or not kind.isalpha():
        raise ConfigError(f"--grammar {text!r}: write json:SCHEMA, regex:[0-9]+ or lark:GRAMMAR")
    if body.startswith("@"):
        try:
            body = Path(body[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--grammar: cannot read {body[1:]}: {reason}") from None
    return Grammar(kind, body)
