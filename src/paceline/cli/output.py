"""Prints completions; what commands that measure share: reports, Ctrl-C and time budgets."""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from rich.console import Console
from rich.text import Text

from paceline.core.stages import info, stage
from paceline.files import check_new
from paceline.lab.budget import Budget
from paceline.lab.report.document import Report, Table
from paceline.lab.report.render import check_path, print_report, print_table, write
from paceline.settings import under

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

_output, _budget = under("Output"), under("Budget")
DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


@dataclass(frozen=True)
class JsonOptions:
    """Whether a command prints its result as JSON."""

    as_json: bool = _output(False, "Print one JSON object instead.", flags=("--json",))

    def show(self, record: dict[str, Any], *parts: Table | str) -> None:
        """Print the record as JSON or, without --json, the tables and lines."""
        if self.as_json:
            print_json(record)
            return
        for part in parts:
            if isinstance(part, Table):
                print_table(part, Console())
            else:
                print(part)


@dataclass(frozen=True)
class WriteOptions(JsonOptions):
    """Options of a command that writes files."""

    force: bool = _output(False, "Replace the output if it exists already.")


def prompt_text(completion: Completion, tokenizer: Any) -> str:
    """The prompt as text; that of a conversation includes its special tokens."""
    if isinstance(completion.prompt, str):
        return completion.prompt
    return str(tokenizer.decode(completion.prompt))


def completion_record(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """A completion for JSON, with the names of the Python API."""
    names = ("text", "token_ids", "logprobs", "finish_reason", "index")
    return {
        "prompt": prompt_text(completion, tokenizer),
        **{name: getattr(completion, name) for name in names},
        "stats": {k: v for k, v in vars(completion.stats).items() if k != "arrivals"},
        **({} if completion.receipt is None else {"receipt": completion.receipt}),
        **({} if completion.error is None else {"error": completion.error}),
    }


def print_json(record: dict[str, Any]) -> None:
    convert = partial(to_builtins, order="deterministic", enc_hook=str)  # sorts sets
    escaped = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(record, ensure_ascii=escaped, default=convert), flush=True)


def summary(completion: Completion, drafts: bool = False) -> str:
    """The line of statistics below a completion; with ``drafts``, also why nothing was drafted."""
    stats, count = completion.stats, len(completion.token_ids)
    unit = "token" if count == 1 else "tokens"
    parts = [
        f"{count} {unit} ({completion.error or completion.finish_reason})",
        f"{stats.tokens_per_second:.0f} tokens/s",
    ]
    if stats.time_to_first_token > 2:  # the rate includes this time
        parts.append(f"first token after {stats.time_to_first_token:.1f} s")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.mean_accepted_length:.2f} tokens per target step")
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
        shares = sorted(stats.drafters.items(), key=lambda item: -item[1])
        parts += [f"{tokens / max(1, count):.0%} from {name}" for name, tokens in shares if tokens]
    elif drafts:
        reasons = Counter(stats.not_drafted).most_common(1)
        parts += [f"no draft was tried: {reason}" for reason, _ in reasons]
    return " · ".join(parts)


class Painter:
    """Colours the streamed text after ``prompt``: green for draft tokens, bold for the target's
    own. A character of several tokens has the style of the last one."""

    def __init__(self, tokenizer: Any, coloured: bool, prompt: Sequence[int] = ()) -> None:
        # Imported here because it loads tokenizers, which --help does not need.
        from paceline.request.text import Detokeniser

        self._detokeniser = Detokeniser(tokenizer, prompt)
        self._coloured = coloured
        self._styles: deque[str] = deque()  # of the characters that have not been shown
        self._last = TARGET_STYLE

    def paint(
        self, token_ids: Iterable[int], from_draft: Iterable[bool], text: str | None = None
    ) -> Text:
        """The next tokens as styled text. ``text`` is the engine's new text, which may lag behind
        the tokens; None shows all that the tokens decode to."""
        if text is not None and not self._coloured:
            return Text(text)
        decoded = ""
        for token, drafted in zip(token_ids, from_draft, strict=True):
            self._last = DRAFT_STYLE if drafted else TARGET_STYLE
            piece = self._detokeniser.feed(token)
            self._styles.extend([self._last] * len(piece))
            decoded += piece
        painted, styles = Text(), self._styles
        shown = decoded if text is None else text
        # An incomplete character at the end of the text has the style of the last token.
        for style, run in groupby(shown, lambda _: styles.popleft() if styles else self._last):
            painted.append("".join(run), style)
        return painted

    def rest(self) -> Text:
        """The incomplete character that the last token left."""
        return Text(self._detokeniser.flush(), self._last)


def stream_to(
    console: Console,
    llm: LLM,
    prompts: Sequence[str] | Sequence[list[int]],
    params: SamplingParams,
    show_draft: bool,
) -> list[Completion]:
    """Print a single completion as it grows, or each of several when it is complete."""
    show = partial(console.print, soft_wrap=True, highlight=False)
    single = len(prompts) == 1 and params.n == 1
    completions: list[Completion] = []

    def painter(prompt: str | list[int]) -> Painter:
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Painter(llm.tokenizer, show_draft, ids)

    growing, events = painter(prompts[0]), llm.stream(prompts, params)
    with stage("reading the prompt"):
        first = next(events)
    for event in chain([first], events):
        done = event.completion
        if single:
            show(growing.paint(event.token_ids, event.from_draft, event.text), end="")
        if done is None:
            continue
        completions.append(done)
        if single:
            console.print()
            continue
        title = prompt_text(done, llm.tokenizer).strip().split("\n", 1)[0]
        title = title if len(title) <= 60 else f"{title[:57]}..."
        console.rule(Text(title, style="dim"), align="left")
        show(painter(done.prompt).paint(done.token_ids, done.draft_mask, done.text))
    return completions


NOT_ENOUGH = 3  # exit status: no error, but the time budget was too small for a result

# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportOptions(WriteOptions):
    """Options of a command that writes a report. Raises ConfigError for an invalid file name,
    WriteError if there is a file."""

    report: str | None = _output(None, "Also write a report to this .html or .md file.")

    def __post_init__(self) -> None:
        if self.report is not None:
            check_path(self.report)
            check_new(self.report, "the report", self.force)

    def emit(self, record: dict[str, Any], report: Report, details: bool = True) -> None:
        """Print the report, or the record as JSON, and write the report's file if there is one."""
        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console(), details)
        if self.report is not None:
            write(report, self.report)
            info(f"report: {self.report}")


@dataclass(frozen=True)
class RunOptions(ReportOptions):
    """Options of a command with a time budget."""

    seconds: float = _budget(180.0, "Time limit, loading included; 0 is none.", low=0)


# -- Ctrl-C and the time ---------------------------------------------------------------------------


class Interruption:
    """A context in which Ctrl-C ends the block instead of the program; ``code`` is then 130."""

    code = 0
    advance: Callable[[str], None]  # set by ``measuring``

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is KeyboardInterrupt:
            self.code = 130
            info("interrupted: the figures cover what was measured until now")
        return kind is KeyboardInterrupt


@contextmanager
def measuring(what: str, budget: Budget, pieces: int = 0) -> Iterator[Interruption]:
    """Show the progress of a measurement: by the seconds of the budget or, if it has no limit, by
    the number of ``pieces``. Call ``advance`` before each piece, with its name. Ctrl-C ends it."""
    seconds = budget.seconds
    total, unit = (pieces, "") if seconds is None else (seconds, "s")
    with Interruption() as interrupted, stage(what, total, unit) as progress:
        done = 0.0

        def advance(note: str) -> None:
            nonlocal done
            now = done + 1 if seconds is None else min(budget.spent, seconds)
            progress.advance(now - done, note)
            done = now

        interrupted.advance = advance
        yield interrupted
