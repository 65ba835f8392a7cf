"""``paceline generate`` and ``paceline chat``, at a terminal or in a pipe."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from paceline.cli.options import ModelOptions, expand
from paceline.cli.output import completion_record, print_json, stream_to, summary
from paceline.core.keywords import did_you_mean
from paceline.core.params import EMPTY_PROMPT, is_unicode
from paceline.core.stages import info
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.files import write_files
from paceline.request.options import SamplingOptions
from paceline.settings import AdapterSettings, entries, explicit, setting, under

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

_output = under("Output")


@dataclass(frozen=True)
class OutputOptions:
    """How completions are shown."""

    as_json: bool = _output(False, "Print one JSON object per completion.", flags=("--json",))
    show_draft: bool | None = _output(
        None, "Colour draft tokens.", flags=("--show-draft/--hide-draft",), shown="on a terminal"
    )


def run(
    llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams, output: OutputOptions
) -> list[Completion]:
    """Print completions: text on stdout and statistics on stderr, so a pipe gets only text."""
    if llm.draft_vocabulary is not None:
        note(f"draft vocabulary: {llm.draft_vocabulary}")
    if output.as_json:
        completions = llm.generate(prompts, params)
        for completion in completions:
            print_json(completion_record(completion, llm.tokenizer))
        note_cuts(llm, completions, params)
        return completions
    if params.receipt or params.logprobs is not None:
        note("--receipt and --logprobs are shown with --json only")
    # An explicit --show-draft holds for pipes, too, where Rich would strip the colours.
    console = Console(force_terminal=True if output.show_draft else None)
    show_draft = console.is_terminal if output.show_draft is None else output.show_draft
    completions = stream_to(console, llm, prompts, params, show_draft)
    for completion in completions:
        note(summary(completion, llm.drafters != ("none",)))
    note_cuts(llm, completions, params)
    return completions


def note_cuts(llm: LLM, completions: list[Completion], params: SamplingParams) -> None:
    """Say so if an answer ended before ``max_tokens`` because nothing more fits."""
    cut = [done for done in completions if done.finish_reason == "length"]
    if any(len(done.token_ids) < params.max_tokens for done in cut):
        note(f"cut short: {llm.context_budget.bounds}")


def note(line: str) -> None:
    """Print a dim line on stderr."""
    Console(stderr=True).print(line, style="dim", highlight=False, soft_wrap=True)


def open_model(
    engine: ModelOptions, adapters: AdapterSettings, sampling: SamplingOptions
) -> tuple[LLM, SamplingParams]:
    """Load the model, its draft and adapters; also returns the sampling parameters, with the first
    adapter. Raises ConfigError for invalid parameters before anything is loaded."""
    sampling.params()
    llm = engine.open(engine.resolved_draft, lora=adapters.adapters)
    first = next(iter(adapters.adapters), None)
    return llm, replace(sampling.params(llm.sampling_defaults), lora=first)


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input if it is "-". Raises PromptError."""
    return checked(sys.stdin.read() if prompt == "-" else prompt)


def checked(text: str) -> str:
    """Raises PromptError for bytes that are not UTF-8, which became lone surrogates."""
    if not is_unicode(text):
        raise PromptError("a prompt is not UTF-8 text; save or convert it as UTF-8")
    return text


@expand
def generate(
    engine: ModelOptions,
    adapters: AdapterSettings,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompts: tuple[str, ...] = setting(
        MISSING, "Texts to continue; - reads standard input.", flags=("PROMPT",)
    ),
    chat: bool = setting(False, "Use the model's chat template.", flags=("--chat/--raw",)),
) -> bool:
    """Continue one or several prompts."""
    texts = list(map(read_prompt, prompts))
    if not chat and not all(texts):
        raise PromptError(EMPTY_PROMPT)
    llm, params = open_model(engine, adapters, sampling)
    inputs: list[str] | list[list[int]] = texts
    if chat:
        inputs = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    return any(completion.error for completion in run(llm, inputs, params, output))


Messages = list[dict[str, str]]
_UNSET: dict[object, str] = {None: "default", (): "none"}  # how /set shows these values
_QUOTES = '"""'
_HELP = f"""\
/set NAME VALUE   a sampling option, as in /set temperature 0.7; /set alone lists them
/draft SPEC       draft with this: auto, none, ngram ...
/save [FILE]      write the conversation as JSON
/clear            forget the conversation and start again
/quit             end; so does Ctrl-D
{_QUOTES}               begins and ends a text of several lines; pasted lines are one text
Ctrl-C            stops the answer"""


@expand
def chat(
    engine: ModelOptions,
    adapters: AdapterSettings,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: str | None = setting(
        None,
        "Question to answer before exiting; without it, chat interactively.",
        flags=("PROMPT",),
    ),
    system: str | None = setting(None, "Instruction that opens the conversation."),
) -> None:
    """Chat with the model; /help lists the commands."""
    llm, params = open_model(engine, adapters, sampling)
    opening = [{"role": "system", "content": system}] if system else []
    session = _Session(llm, llm, engine, sampling, output, opening, params.lora, [*opening])
    if prompt is not None:
        session.answer(read_prompt(prompt))
        return
    while (text := _read_input()) is not None:
        try:
            if not session.run_command(checked(text)) and text:
                session.answer(text)
        except (PacelineError, KeyboardInterrupt) as error:
            if not sys.stdin.isatty():
                raise
            info(f"error: {error}" if isinstance(error, PacelineError) else "stopped")


@dataclass
class _Session:
    """A conversation and the settings for its next answer. ``base`` was loaded at the start;
    ``llm`` is the same, or another one that shares its weights and has another draft."""

    base: LLM
    llm: LLM
    engine: ModelOptions
    sampling: SamplingOptions
    output: OutputOptions
    opening: Messages
    lora: str | None
    messages: Messages
    saved: set[str] = field(default_factory=set)  # files of this session, which /save replaces

    def answer(self, text: str) -> None:
        """Answer a message of the user; a stopped answer is kept as far as it got."""
        messages = [*self.messages, {"role": "user", "content": text}]
        params = replace(self.sampling.params(self.llm.sampling_defaults), lora=self.lora)
        prompts = [self.llm.render_chat(messages)]
        markdown = sys.stdout.isatty() and params.n == 1
        if markdown and not self.output.as_json and self.output.show_draft is None:
            answer = _stream_markdown(self.llm, prompts[0], params)
        else:
            answer = run(self.llm, prompts, params, self.output)[0].text
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def run_command(self, line: str) -> bool:
        """Run the line if it is a command; returns whether it was one."""
        commands: dict[str, Callable[[str], None]] = {
            **{"/help": lambda _: info(_HELP), "/set": self.set, "/draft": self.draft},
            **{"/save": self.save, "/clear": self.clear, "/reset": self.clear},
        }
        name, _, rest = line.partition(" ")
        if not name.startswith("/") or "\n" in line or "/" in name[1:]:
            return False
        if name not in commands:
            advice = did_you_mean(name, commands, "/help lists all commands")
            raise ConfigError(f"there is no {name}; {advice}")
        commands[name](rest.strip())
        return True

    def set(self, words: str) -> None:
        """Change a sampling option. Raises ConfigError."""
        known = {entry.name: entry for entry in entries(SamplingOptions, "command")}
        name, _, value = words.partition(" ")
        if not words:
            values = {name: getattr(self.sampling, name) for name in known}
            info("  ".join(f"{name} {_UNSET.get(value, value)}" for name, value in values.items()))
            return
        entry = known.get(name.replace("-", "_"))
        if entry is None:
            advice = did_you_mean(name, known, "/set lists all options")
            raise ConfigError(f"there is no option {name}; {advice}")
        try:
            parsed = msgspec.convert((value,) if entry.is_list else value, entry.type, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"{value!r} is not a value of {name}; /set lists them") from None
        changed = replace(self.sampling, **{entry.name: parsed})
        changed.params()
        self.sampling = changed

    def draft(self, spec: str) -> None:
        """Use another draft with the same weights. Raises PacelineError."""
        if not spec:
            return info(f"drafting with {', '.join(self.llm.drafts)}; /draft SPEC changes it")
        settings = explicit(vars(self.engine), "with_draft")
        other = self.base.with_draft(None if spec == "none" else spec, **settings)
        if self.llm is not self.base:
            self.llm.close()
        self.llm = other
        info(f"drafting with {', '.join(other.drafts) or 'nothing'}")

    def save(self, path: str) -> None:
        """Write the messages to a file. Raises ConfigError and WriteError."""
        file = path or time.strftime("chat-%Y%m%d-%H%M%S.json")
        if Path(file).exists() and file not in self.saved:
            raise ConfigError(f"{file} exists already; name another file")
        text = json.dumps(self.messages, indent=2, ensure_ascii=False)
        write_files({Path(file): f"{text}\n".encode()}, "the conversation")
        self.saved.add(file)
        info(f"wrote {file}")

    def clear(self, _: str) -> None:
        self.messages = list(self.opening)


def _stream_markdown(llm: LLM, prompt: list[int], params: SamplingParams) -> str:
    """Show a growing answer as Markdown and return its text. Complete blocks are printed once, the
    last one is redrawn. Ctrl-C ends the answer."""
    console, text, shown = Console(), "", 0  # characters that have been printed
    completion: Completion | None = None
    from_draft, start = list[bool](), time.perf_counter()  # from_draft: of each token
    events, status = llm.stream([prompt], params), f"reading {len(prompt):,} tokens"
    with suppress(KeyboardInterrupt), Live(status, console=console, transient=True) as live:
        for event in events:
            text, completion = text + event.text, event.completion
            from_draft += event.from_draft
            end = text.rfind("\n\n", shown)  # of complete blocks: not in a code fence
            while end >= 0 and text.count("```", shown, end) % 2:
                end = text.rfind("\n\n", shown, end)
            start_of_block, shown = shown, shown if end < 0 else end + 2
            live.update(Markdown(text[shown:]))
            if shown > start_of_block:
                console.print(Markdown(text[start_of_block:shown]), "")  # and an empty line
    events.close()  # type: ignore[attr-defined]
    console.print(Markdown(text[shown:]))
    if completion is None:
        count, seconds = len(from_draft), time.perf_counter() - start
        drafted = f" · {sum(from_draft) / count:.0%} drafted" if any(from_draft) else ""
        info(f"{count} tokens (stopped) · {count / seconds:.0f} tokens/s{drafted}")
    else:
        note(summary(completion, llm.drafters != ("none",)))
        note_cuts(llm, [completion], params)
    return text


# -- reading input ---------------------------------------------------------------------------------


def _read_input() -> str | None:
    """The next text from the user, or None at the end. Lines that are pasted together, or that
    stand between triple quotes, are one text. Ctrl-C drops the line."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # gives input() line editing and a history

        with suppress(Exception):  # libedit does not support this setting
            readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        text = input("you> " if interactive else "").strip()
        while interactive and select.select([sys.stdin], [], [], 0.02)[0]:  # pasted
            text += "\n" + input()
        while text.startswith(_QUOTES) and not text.endswith(_QUOTES, len(_QUOTES)):
            text += "\n" + input("...> " if interactive else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        print(" (Ctrl-D quits)", file=sys.stderr)
        return ""
    if text.startswith(_QUOTES):
        text = text.removeprefix(_QUOTES).removesuffix(_QUOTES)
    text = text.strip()
    return None if text in ("/quit", "/exit") else text
