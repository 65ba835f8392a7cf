"""``paceline generate`` and ``paceline chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.options import EngineOptions, OutputOptions, SamplingOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

Messages = list[dict[str, str]]


def _show(
    llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams, output: OutputOptions
) -> list[Completion]:
    """Text goes to stdout, figures to stderr, so that a pipe carries the text alone."""
    console = Console()
    show_draft = console.is_terminal if output.show_draft is None else output.show_draft
    # A flag given by hand holds for pipes too, where Rich would strip the colours.
    if output.show_draft:
        console = Console(force_terminal=True)
    completions = stream_to(console, llm, prompts, params, show_draft)
    notes = Console(stderr=True)
    for completion in completions:
        notes.print(summary(completion), style="dim", highlight=False)
    return completions


def _template(llm: LLM, conversations: list[Messages]) -> list[list[int]]:
    """Token ids of conversations, ready for the assistant's answer."""
    from paceline.errors import PromptError

    if llm.tokenizer.chat_template is None:
        raise PromptError("this model has no chat template; use `paceline generate --raw`")
    ids = [
        llm.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for turns in conversations
    ]
    return [[int(token) for token in row] for row in ids]


@expand
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Texts to continue; - reads stdin.")
    ],
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put prompts into the model's chat template.")
    ] = False,
) -> None:
    """Continue one or several prompts."""
    params = sampling.params()
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    llm = engine.open(engine.resolved_draft)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    if not output.as_json:
        _show(llm, _template(llm, conversations) if chat else texts, params, output)
        return
    completions = llm.chat(conversations, params) if chat else llm.generate(texts, params)
    for completion in completions:
        print_json(completion_record(completion))


@expand
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Ask this and exit; without it, talk."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Instruction that opens the conversation.")
    ] = None,
) -> None:
    """Talk to the model: one turn a line; /reset starts again, /quit or Ctrl-D ends."""
    params = sampling.params()
    llm = engine.open(engine.resolved_draft)
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
    if not output.as_json:
        return _show(llm, _template(llm, [messages]), params, output)[0]
    completions = llm.chat(messages, params)
    for completion in completions:
        print_json(completion_record(completion))
    return completions[0]


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
