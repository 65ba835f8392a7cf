"""``paceline generate`` and ``paceline chat``."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import ModelOptions, OutputOptions, SamplingOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary
from paceline.settings import setting

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

Messages = list[dict[str, str]]


def _run(
    llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams, output: OutputOptions
) -> list[Completion]:
    """Text goes to stdout, figures to stderr, so that a pipe carries the text alone."""
    notes = Console(stderr=True)
    if llm.draft_vocabulary is not None:
        notes.print(f"draft vocabulary: {llm.draft_vocabulary}", style="dim", highlight=False)
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
        line = summary(completion, bool(llm.drafters))
        notes.print(line, style="dim", highlight=False, soft_wrap=True)
    return completions


def _opened(engine: ModelOptions, sampling: SamplingOptions) -> tuple[LLM, SamplingParams]:
    sampling.params()  # what is wrong is said before anything is loaded
    llm = engine.open(engine.resolved_draft)
    return llm, sampling.params(llm.sampling_defaults)


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


@expand
def generate(
    engine: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompts: tuple[str, ...] = setting(
        MISSING, "Texts to continue; - reads stdin.", flags=("PROMPT",)
    ),
    chat: bool = setting(
        False, "Put prompts into the model's chat template.", flags=("--chat/--raw",)
    ),
) -> bool:
    """Continue one or several prompts."""
    texts = list(map(_read, prompts))
    llm, params = _opened(engine, sampling)
    inputs: list[str] | list[list[int]] = texts
    if chat:
        inputs = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    return any(completion.error for completion in _run(llm, inputs, params, output))


@expand
def chat(
    engine: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: str | None = setting(None, "Ask this and exit; without it, talk.", flags=("PROMPT",)),
    system: str | None = setting(None, "Instruction that opens the conversation."),
) -> None:
    """Talk to the model: one turn a line; /reset starts again, /quit or Ctrl-D ends."""
    llm, params = _opened(engine, sampling)
    opening: Messages = [{"role": "system", "content": system}] if system else []

    def answered(messages: Messages, text: str) -> Messages:
        """The conversation with a turn of the user and the first of the answers to it."""
        asked = [*messages, {"role": "user", "content": text}]
        first = _run(llm, [llm.render_chat(asked)], params, output)[0]
        return [*asked, {"role": "assistant", "content": first.text}]

    if prompt is not None:
        answered(opening, _read(prompt))
        return
    messages = opening
    while (line := _read_turn()) is not None:
        if line == "/reset":
            messages = opening
        elif line:
            messages = answered(messages, line)


def _read_turn() -> str | None:
    """The next line from the user, or None at the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())
    try:
        line = input("you> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/quit", "/exit") else line
