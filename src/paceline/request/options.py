"""A request's parameters as a table of settings: options of commands, and what they say in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from paceline.core.params import Grammar, SamplingParams
from paceline.errors import ConfigError
from paceline.request.defaults import SamplingDefaults
from paceline.settings import under

_sampling = under("Sampling")
_of_model = partial(_sampling, None, shown="the model's")


@dataclass(frozen=True)
class DistributionOptions:
    """What shapes a request's distribution: parameters of SamplingParams. What is None is as the
    model's default (``SamplingDefaults``)."""

    temperature: float | None = _of_model("0 is greedy.", flags=("--temperature", "-t"))
    top_k: int | None = _of_model("Keep the k likeliest; 0 is off.")
    top_p: float | None = _of_model("Keep this much probability.")
    min_p: float | None = _of_model("Drop tokens below this share of the likeliest.")
    repetition_penalty: float | None = _of_model("Above 1 discourages repeats.")
    presence_penalty: float = _sampling(0.0, "Lowers tokens that occurred, from -2 to 2.")
    frequency_penalty: float = _sampling(0.0, "Lowers tokens by each occurrence, from -2 to 2.")
    logit_bias: tuple[str, ...] = _sampling((), "Add to a token's logit.", metavar="ID=VALUE")

    def params(self, defaults: SamplingDefaults | None = None) -> SamplingParams:
        """``defaults`` are the model's. Raises ConfigError on a value out of range."""
        given = {item.name: vars(self)[item.name] for item in fields(SamplingDefaults)}
        filled = SamplingDefaults(**given).over(defaults or SamplingDefaults()).filled()
        values = vars(self) | filled
        values["logit_bias"] = parse_logit_bias(self.logit_bias)
        if values.get("grammar") is not None:
            values["grammar"] = parse_grammar(values["grammar"])
        return SamplingParams(**values)


@dataclass(frozen=True)
class SamplingOptions(DistributionOptions):
    """One request's parameters."""

    max_tokens: int = _sampling(128, "Most new tokens.")
    min_tokens: int = _sampling(0, "Fewest new tokens.")
    seed: int | None = _sampling(None, "Same seed, same text, whatever the draft.", shown="random")
    stop: tuple[str, ...] = _sampling((), "Stop at this string.")
    stop_token_ids: tuple[int, ...] = _sampling((), "Stop at this id.", flags=("--stop-token-id",))
    ignore_eos: bool = _sampling(False, "Go on after end-of-sequence tokens.")
    logprobs: int | None = _sampling(None, "Log probabilities of so many tokens, in --json.")
    grammar: str | None = _sampling(
        None,
        "Form of the text: json, json:SCHEMA, regex:..., lark:..., KIND:@FILE.",
        metavar="KIND:TEXT",
    )
    skip_special_tokens: bool = _sampling(True, "Leave special tokens out of the text.")
    receipt: bool = _sampling(False, "With --json: what paceline replay decodes it again from.")
    n: int = _sampling(1, "Completions of each prompt.", flags=("--n",))


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    split = (pair.partition("=") for pair in pairs)
    try:
        return {int(token): float(value) for token, _, value in split}
    except ValueError:
        raise ConfigError(f"--logit-bias {' '.join(pairs)}: write ID=VALUE, as in 42=-5") from None


def parse_grammar(text: str) -> Grammar:
    """``json``, ``KIND:TEXT`` or ``KIND:@FILE``. Raises ConfigError."""
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
