"""``paceline generate`` and ``paceline chat``."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline.cli.options import ModelOptions, OutputOptions, SamplingOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary
from paceline.cli.progress import showing
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
        with showing():
            completions = llm.generate(prompts, params)
        for completion in completions:
            print_json(completion_record(completion, llm.tokenizer))
        return completions
    # A flag given by hand holds for pipes too, where Rich would strip the colours.
    console = Console(force_terminal=True if output.show_draft else None)
    show_draft = console.is_terminal if output.show_draft is None else output.show_draft
    completions = stream_to(console, llm, prompts, params, show_draft)
    for completion in completions:
        notes.print(
            summary(completion, bool(llm.drafters)), style="dim", highlight=False, soft_wrap=True
        )
    return completions


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
) -> None:
    """Continue one or several prompts."""
    sampling.params()  # what is wrong is said before anything is loaded
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    llm = engine.open(engine.resolved_draft)
    params = sampling.params(llm.sampling_defaults)
    inputs: list[str] | list[list[int]] = texts
    if chat:
        inputs = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    if any(completion.error for completion in _run(llm, inputs, params, output)):
        raise typer.Exit(1)


@expand
def chat(
    engine: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: str | None = setting(None, "Ask this and exit; without it, talk.", flags=("PROMPT",)),
    system: str | None = setting(None, "Instruction that opens the conversation."),
) -> None:
    """Talk to the model: one turn a line; /reset starts again, /quit or Ctrl-D ends."""
    sampling.params()  # what is wrong is said before anything is loaded
    llm = engine.open(engine.resolved_draft)
    params = sampling.params(llm.sampling_defaults)
    opening: Messages = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        text = sys.stdin.read() if prompt == "-" else prompt
        _answer(llm, [*opening, {"role": "user", "content": text}], params, output)
        return
    messages = list(opening)
    while (line := _read_turn()) is not None:
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, params, output)
            messages.append({"role": "assistant", "content": answer.text})


def _answer(
    llm: LLM, messages: Messages, params: SamplingParams, output: OutputOptions
) -> Completion:
    """Show the answers to a conversation; the first of them continues it."""
    return _run(llm, [llm.render_chat(messages)], params, output)[0]


def _read_turn() -> str | None:
    """The next line from the user, or None at the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())

        mark = "you> "
    else:
        mark = ""
    try:
        line = input(mark).strip()
    except EOFError:
        return None
    return None if line in ("/quit", "/exit") else line
