"""``paceline generate``, and what ``paceline chat`` shares with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline import Grammar, SamplingParams
from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary
from paceline.core.params import EMPTY_PROMPT
from paceline.errors import ConfigError, PromptError
from paceline.request.defaults import SamplingDefaults
from paceline.settings import AdapterSettings, setting, under

if TYPE_CHECKING:
    from paceline import LLM, Completion

_output, _sampling = under("Output"), under("Sampling")
_of_model = partial(_sampling, None, shown="the model's")


@dataclass(frozen=True)
class OutputOptions:
    """How completions are shown."""

    as_json: bool = _output(False, "One JSON object a completion.", flags=("--json",))
    show_draft: bool | None = _output(
        None, "Colour drafted tokens.", flags=("--show-draft/--hide-draft",), shown="on a terminal"
    )


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
        raise typer.BadParameter(
            f"--logit-bias {' '.join(pairs)}: write ID=VALUE, as in 42=-5"
        ) from None


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


def run(
    llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams, output: OutputOptions
) -> list[Completion]:
    """Text goes to stdout, figures to stderr, so that a pipe carries the text alone."""
    if llm.draft_vocabulary is not None:
        note(f"draft vocabulary: {llm.draft_vocabulary}")
    if output.as_json:
        completions = llm.generate(prompts, params)
        for completion in completions:
            print_json(completion_record(completion, llm.tokenizer))
        return completions
    # A flag given by hand holds for pipes too, where Rich would strip the colours.
    console = Console(force_terminal=True if output.show_draft else None)
    show_draft = console.is_terminal if output.show_draft is None else output.show_draft
    completions = stream_to(console, llm, prompts, params, show_draft)
    for completion in completions:
        note(summary(completion, llm.drafters != ("none",)))
    return completions


def note(line: str) -> None:
    """A dim line on stderr."""
    Console(stderr=True).print(line, style="dim", highlight=False, soft_wrap=True)


def opened(
    engine: ModelOptions, adapters: AdapterSettings, sampling: SamplingOptions
) -> tuple[LLM, SamplingParams]:
    sampling.params()  # what is wrong is said before anything is loaded
    llm = engine.open(engine.resolved_draft, lora=adapters.adapters)
    first = next(iter(adapters.adapters), None)
    return llm, replace(sampling.params(llm.sampling_defaults), lora=first)


def read(prompt: str) -> str:
    """A prompt, or for - what stands on standard input. Raises PromptError."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # bytes that are no UTF-8 may have come through as half surrogate pairs
    except UnicodeError:
        raise PromptError("a prompt is not UTF-8 text; save or convert it as UTF-8") from None
    return text


@expand
def generate(
    engine: ModelOptions,
    adapters: AdapterSettings,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompts: tuple[str, ...] = setting(
        MISSING, "Texts to continue; - is stdin.", flags=("PROMPT",)
    ),
    chat: bool = setting(False, "Use the model's chat template.", flags=("--chat/--raw",)),
) -> bool:
    """Continue one or several prompts."""
    texts = list(map(read, prompts))
    if not chat and not all(texts):
        raise PromptError(EMPTY_PROMPT)
    llm, params = opened(engine, adapters, sampling)
    inputs: list[str] | list[list[int]] = texts
    if chat:
        inputs = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    return any(completion.error for completion in run(llm, inputs, params, output))
