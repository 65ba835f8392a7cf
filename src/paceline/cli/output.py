"""Completions on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from paceline.files.ownership import force

if TYPE_CHECKING:
    from paceline import LLM, Completion, SamplingParams

FORCE = "Replace files that Paceline did not write, too; they are named before the work begins."
DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


def debugging() -> bool:
    """Whether tracebacks and warnings of libraries are wanted (--debug)."""
    return os.environ.get("PACELINE_DEBUG", "0") != "0"


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of the libraries below us off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debugging():
        warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()


def replace_anything(allowed: bool) -> None:
    """What ``--force`` asks for: foreign files are replaced, and named on stderr before that."""
    force((lambda line: typer.echo(line, err=True)) if allowed else None)


def prompt_text(completion: Completion, tokenizer: Any) -> str:
    """The prompt as text; a rendered conversation shows its special tokens."""
    if isinstance(completion.prompt, str):
        return completion.prompt
    return str(tokenizer.decode(completion.prompt))


def completion_record(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """A completion as JSON knows it; the names are those of the Python API."""
    failed = {} if completion.error is None else {"error": completion.error}
    return {
        "prompt": prompt_text(completion, tokenizer),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "index": completion.index,
        "lossy": completion.lossy,
        "stats": {k: v for k, v in vars(completion.stats).items() if k != "arrivals"},
        **failed,
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, default=_plain), flush=True)


def summary(completion: Completion, drafts: bool = False) -> str:
    """One line of figures for people; ``drafts``: there was a drafter."""
    stats = completion.stats
    parts = [
        f"{len(completion.token_ids)} tokens ({completion.error or completion.finish_reason})",
        f"{stats.tokens_per_second:.0f} tokens/s",
    ]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.mean_accepted_length:.2f} tokens per target step")
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
    elif drafts:
        parts.append("no draft was tried: it would not have paid")
    if completion.lossy:
        parts.append("LOSSY: not the model's own distribution")
    return " · ".join(parts)


class Painter:
    """Colours streamed text by where its tokens came from.

    The text is the engine's own and is never altered; only the boundaries between tokens are
    worked out here, by decoding. Where a character spans tokens, it takes the later one's colour.
    ``prompt`` is what stands before the text.
    """

    def __init__(self, tokenizer: Any, coloured: bool, prompt: Sequence[int] = ()) -> None:
        from paceline.request.detokenise import (
            Detokeniser,
        )  # loads tokenizers, which --help need not

        self._detokeniser = Detokeniser(tokenizer, prompt)
        self._coloured = coloured
        self._style = TARGET_STYLE
        self._pieces: deque[tuple[int, bool]] = deque()  # characters not yet shown, from draft?

    def paint(self, text: str, token_ids: Iterable[int], from_draft: Iterable[bool]) -> Text:
        """The new text as styled runs; call once for every event, in order."""
        if not self._coloured:
            return Text(text)
        for token, drafted in zip(token_ids, from_draft, strict=True):
            self._pieces.append((len(self._detokeniser.feed(token)), drafted))
        painted = Text()
        position = 0
        while position < len(text) and self._pieces:
            length, drafted = self._pieces.popleft()
            self._style = DRAFT_STYLE if drafted else TARGET_STYLE
            painted.append(text[position : position + length], self._style)
            position += length
            if position > len(text):  # the engine holds the rest back for now
                self._pieces.appendleft((position - len(text), drafted))
        # An unfinished character at the text's end belongs to its last token.
        painted.append(text[position:], self._style)
        return painted


def stream_to(
    console: Console,
    llm: LLM,
    prompts: Sequence[str] | Sequence[list[int]],
    params: SamplingParams,
    show_draft: bool,
) -> list[Completion]:
    """Print completions as they grow (a single one) or as they finish (several)."""
    single = len(prompts) == 1 and params.n == 1
    painters: dict[tuple[int, int], Painter] = {}
    texts: dict[tuple[int, int], Text] = {}
    done: list[Completion] = []
    for event in llm.stream(prompts, params):
        key = (event.request, event.index)
        if key not in painters:
            prompt = prompts[event.request]
            ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            painters[key] = Painter(llm.tokenizer, show_draft, ids)
        painter = painters[key]
        new = painter.paint(event.text, event.token_ids, event.from_draft)
        if single:
            console.print(new, end="", soft_wrap=True, highlight=False)
        else:
            texts.setdefault(key, Text()).append_text(new)
        if event.completion is None:
            continue
        done.append(event.completion)
        if not single:
            first = prompt_text(event.completion, llm.tokenizer).strip().split("\n", 1)[0]
            title = first if len(first) <= 60 else f"{first[:57]}..."
            console.rule(Text(title, style="dim"), align="left")
            console.print(texts.pop(key), soft_wrap=True, highlight=False)
    if single:
        console.print()
    return done
