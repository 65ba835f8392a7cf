"""Sampling options, shared by the commands that decode and those that test decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import ConfigError
from paceline.settings import under

if TYPE_CHECKING:
    from paceline import Grammar, SamplingParams

_sampling = under("Sampling")


@dataclass(frozen=True)
class DistributionOptions:
    """What shapes a request's distribution; names, defaults and meanings are those of
    SamplingParams."""

    temperature: float = _sampling(0.0, "0 is greedy.", flags=("--temperature", "-t"))
    top_k: int = _sampling(0, "Keep the k likeliest; 0 is off.")
    top_p: float = _sampling(1.0, "Keep this much probability.")
    min_p: float = _sampling(0.0, "Drop tokens below this share of the likeliest.")
    repetition_penalty: float = _sampling(1.0, "Above 1 discourages repeats.")
    presence_penalty: float = _sampling(0.0, "From -2 to 2, once a token.")
    frequency_penalty: float = _sampling(0.0, "From -2 to 2, per occurrence.")
    logit_bias: tuple[str, ...] = _sampling(
        (), "Add to a token's logit; repeatable.", metavar="ID=VALUE"
    )

    def params(self) -> SamplingParams:
        """Raises ConfigError on a value out of range."""
        from paceline import SamplingParams

        values = vars(self) | {"logit_bias": parse_logit_bias(self.logit_bias)}
        if values.get("grammar") is not None:
            values["grammar"] = parse_grammar(values["grammar"])
        return SamplingParams(**values)


@dataclass(frozen=True)
class SamplingOptions(DistributionOptions):
    """One request's parameters."""

    max_tokens: int = _sampling(128, "Stop after so many.")
    min_tokens: int = _sampling(0, "Do not stop before so many.")
    seed: int | None = _sampling(None, "Same seed, same text, whatever the draft.", shown="random")
    stop: tuple[str, ...] = _sampling((), "Stop at this string; repeatable.")
    stop_token_ids: tuple[int, ...] = _sampling(
        (), "Stop at this token id; repeatable.", flags=("--stop-token-id",)
    )
    ignore_eos: bool = _sampling(False, "Go on after end-of-sequence tokens.")
    logprobs: int | None = _sampling(None, "Log probabilities of so many alternatives (in --json).")
    grammar: str | None = _sampling(
        None,
        "What the text must look like: json, json:SCHEMA, regex:..., lark:..., or KIND:@FILE.",
        metavar="KIND:TEXT",
    )
    skip_special_tokens: bool = _sampling(True, "Leave special tokens out of the text.")
    n: int = _sampling(1, "Completions of each prompt.", flags=("--n",))


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias {pair!r}: write ID=VALUE, as in 42=-5"
            ) from None
    return biases


def parse_grammar(text: str) -> Grammar:
    """``json``, ``KIND:TEXT`` or ``KIND:@FILE``. Raises ConfigError."""
    from paceline import Grammar

    kind, colon, body = text.partition(":")
    if text == "json":
        return Grammar.json()
    if not colon:
        raise ConfigError(f"--grammar {text!r}: write KIND:TEXT, as in regex:[0-9]+")
    if body.startswith("@"):
        try:
            body = Path(body[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--grammar: cannot read {body[1:]}: {error}") from None
    return Grammar(kind, body)
