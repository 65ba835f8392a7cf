"""``paceline generate``, and what ``paceline chat`` shares with it."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary
from paceline.core.params import EMPTY_PROMPT
from paceline.errors import PromptError
from paceline.request.options import SamplingOptions
from paceline.settings import AdapterSettings, setting, under

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

_output = under("Output")


@dataclass(frozen=True)
class OutputOptions:
    """How completions are shown."""

    as_json: bool = _output(False, "One JSON object a completion.", flags=("--json",))
    show_draft: bool | None = _output(
        None, "Colour drafted tokens.", flags=("--show-draft/--hide-draft",), shown="on a terminal"
    )


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
