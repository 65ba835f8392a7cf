"""Sampling options, shared by the commands that decode and those that test decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.values import parse_grammar, parse_logit_bias

if TYPE_CHECKING:
    from paceline import SamplingParams

_SAMPLING = "Sampling"


@dataclass(frozen=True)
class DistributionOptions:
    """What shapes a request's distribution; names, defaults and meanings are those of
    SamplingParams."""

    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING),
    ] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Keep the k likeliest; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep this much probability.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 discourages repeats.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="From -2 to 2, once a token.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="From -2 to 2, per occurrence.", rich_help_panel=_SAMPLING)
    ] = 0.0
    logit_bias: Annotated[
        list[str],
        typer.Option(
            metavar="ID=VALUE",
            help="Add to a token's logit; repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = field(default_factory=list)

    def shaping(self) -> dict[str, Any]:
        """As SamplingParams takes it."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": parse_logit_bias(self.logit_bias),
        }


@dataclass(frozen=True)
class SamplingOptions(DistributionOptions):
    """One request's parameters."""

    max_tokens: Annotated[
        int,
        typer.Option(help="Stop after so many.", rich_help_panel=_SAMPLING),
    ] = 128
    min_tokens: Annotated[
        int, typer.Option(help="Do not stop before so many.", rich_help_panel=_SAMPLING)
    ] = 0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same text, whatever the draft.",
            rich_help_panel=_SAMPLING,
            show_default="random",
        ),
    ] = None
    stop: Annotated[
        list[str],
        typer.Option(help="Stop at this string; repeatable.", rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    stop_token_id: Annotated[
        list[int],
        typer.Option(help="Stop at this token id; repeatable.", rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on after end-of-sequence tokens.", rich_help_panel=_SAMPLING
        ),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log probabilities of so many alternatives (in --json).",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:TEXT",
            help="What the text must look like: json, json:SCHEMA, regex:..., lark:..., "
            "or KIND:@FILE.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool,
        typer.Option(help="Leave special tokens out of the text.", rich_help_panel=_SAMPLING),
    ] = True
    n: Annotated[
        int, typer.Option("--n", help="Completions of each prompt.", rich_help_panel=_SAMPLING)
    ] = 1

    def params(self) -> SamplingParams:
        """Raises ConfigError on a value out of range."""
        from paceline import SamplingParams

        return SamplingParams(
            **self.shaping(),
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_id),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            grammar=None if self.grammar is None else parse_grammar(self.grammar),
            skip_special_tokens=self.skip_special_tokens,
            n=self.n,
        )
