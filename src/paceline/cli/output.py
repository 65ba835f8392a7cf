"""Completions on a terminal, in a pipe, and as JSON; and what the measuring commands share:
reports, Ctrl-C and budgets."""

from __future__ import annotations

import errno
import json
import os
import warnings
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
from paceline.errors import PacelineError
from paceline.files.ownership import force
from paceline.lab.budget import Budget
from paceline.lab.report.document import Report, Table
from paceline.lab.report.render import check_path, print_report, print_table, write
from paceline.settings import under

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

_output, _budget = under("Output"), under("Budget")
DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


def debugging() -> bool:
    """Whether tracebacks and warnings of libraries are wanted (--debug)."""
    return os.environ.get("PACELINE_DEBUG", "0") != "0"


def reason_of(error: Exception) -> str:
    """What the one line says that a command ends with."""
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of the disk behind stdout
        return f"the output cannot be written: {error.strerror}; make room there, and run it again"
    return f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback"


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of the libraries below us off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debugging():
        warnings.filterwarnings("ignore")


@dataclass(frozen=True)
class JsonOptions:
    """For whom a command shows its outcome."""

    as_json: bool = _output(False, "Print one JSON object instead.", flags=("--json",))

    def show(self, record: dict[str, Any], *parts: Table | str) -> None:
        """The record for programs or, for people, tables and lines."""
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
    """The same of one that writes files, and what it may replace."""

    force: bool = _output(
        False, "Also overwrite files that Paceline did not write; they are named first."
    )

    def __post_init__(self) -> None:
        force(info if self.force else None)


def prompt_text(completion: Completion, tokenizer: Any) -> str:
    """The prompt as text; a rendered conversation shows its special tokens."""
    if isinstance(completion.prompt, str):
        return completion.prompt
    return str(tokenizer.decode(completion.prompt))


def completion_record(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """A completion as JSON knows it; the names are those of the Python API."""
    names = ("text", "token_ids", "logprobs", "finish_reason", "index")
    return {
        "prompt": prompt_text(completion, tokenizer),
        **{name: getattr(completion, name) for name in names},
        "stats": {k: v for k, v in vars(completion.stats).items() if k != "arrivals"},
        **({} if completion.receipt is None else {"receipt": completion.receipt}),
        **({} if completion.error is None else {"error": completion.error}),
    }


def print_json(record: dict[str, Any]) -> None:
    plain = partial(to_builtins, order="deterministic", enc_hook=str)  # sets are sorted
    print(json.dumps(record, ensure_ascii=False, default=plain), flush=True)


def summary(completion: Completion, drafts: bool = False) -> str:
    """One line of figures for people; ``drafts``: there was a drafter."""
    stats, written = completion.stats, len(completion.token_ids)
    unit = "token" if written == 1 else "tokens"
    parts = [
        f"{written} {unit} ({completion.error or completion.finish_reason})",
        f"{stats.tokens_per_second:.0f} tokens/s",
    ]
    if stats.time_to_first_token > 2:  # of a long prompt, whose time the rate counts
        parts.append(f"the first after {stats.time_to_first_token:.1f} s")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.mean_accepted_length:.2f} tokens per target step")
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
        shares = sorted(stats.drafters.items(), key=lambda item: -item[1])
        parts += [f"{count / max(1, written):.0%} from {name}" for name, count in shares if count]
    elif drafts:
        reasons = Counter(stats.not_drafted).most_common(1)
        parts += [f"no draft was tried: {reason}" for reason, _ in reasons]
    return " · ".join(parts)


def shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


class Painter:
    """Colours streamed text, behind ``prompt``, by where its tokens came from. A character that
    spans tokens takes the later one's colour."""

    def __init__(self, tokenizer: Any, coloured: bool, prompt: Sequence[int] = ()) -> None:
        # Here, because it loads tokenizers, which --help need not.
        from paceline.request.text import Detokeniser

        self._detokeniser = Detokeniser(tokenizer, prompt)
        self._coloured = coloured
        self._styles: deque[str] = deque()  # of characters that were not shown yet
        self._last = TARGET_STYLE

    def paint(
        self, token_ids: Iterable[int], from_draft: Iterable[bool], text: str | None = None
    ) -> Text:
        """The next tokens as styled runs. ``text`` is the engine's, which may hold some back; None:
        what their decoding gives."""
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
        # An unfinished character at the text's end belongs to its last token.
        for style, run in groupby(shown, lambda _: styles.popleft() if styles else self._last):
            painted.append("".join(run), style)
        return painted

    def rest(self) -> Text:
        """Characters that the last token left unfinished."""
        return Text(self._detokeniser.flush(), self._last)


def stream_to(
    console: Console,
    llm: LLM,
    prompts: Sequence[str] | Sequence[list[int]],
    params: SamplingParams,
    show_draft: bool,
) -> list[Completion]:
    """Print completions as they grow (a single one) or as they finish (several)."""
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
        console.rule(Text(shortened(title), style="dim"), align="left")
        show(painter(done.prompt).paint(done.token_ids, done.draft_mask, done.text))
    return completions


NOT_ENOUGH = 3  # exit status: nothing is wrong, but the budget was too small to say anything

# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportOptions(WriteOptions):
    """Where the result goes besides the terminal. Raises ConfigError on a bad report's name."""

    report: str | None = _output(None, "Also write a report, an .html or .md file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is not None:
            check_path(self.report)

    def emit(self, record: dict[str, Any], report: Report, details: bool = True) -> None:
        """Tables or JSON to stdout, and the report's file if one was asked for."""
        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console(), details)
        if self.report is not None:
            write(report, self.report)
            info(f"report: {self.report}")


@dataclass(frozen=True)
class RunOptions(ReportOptions):
    """How long measuring may take, and where results go."""

    seconds: float = _budget(
        180.0, "Time limit in seconds, loading included; 0 is no limit.", low=0
    )

    def begin(self) -> Budget:
        return Budget(self.seconds or None)


# -- Ctrl-C and the time ---------------------------------------------------------------------------


class Interruption:
    """Ctrl-C ends the block early instead of the program; ``code`` is the exit status, then 130."""

    code = 0

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is KeyboardInterrupt:
            self.code = 130
            info("interrupted: the figures cover what was measured until now")
        return kind is KeyboardInterrupt


@contextmanager
def spending(what: str, budget: Budget, pieces: int = 0) -> Iterator[Callable[[str], None]]:
    """A stage of so many seconds or, without an end, of so many pieces; given what comes next."""
    seconds = budget.seconds
    total, unit = (pieces, "") if seconds is None else (seconds, "s")
    with stage(what, total, unit) as begun:
        shown = 0.0

        def advance(note: str) -> None:
            nonlocal shown
            now = shown + 1 if seconds is None else min(budget.spent, seconds)
            begun.advance(now - shown, note)
            shown = now

        yield advance
