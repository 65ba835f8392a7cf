"""Completions on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from paceline.core.stages import info
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


def replace_anything(allowed: bool) -> None:
    """What ``--force`` asks for: foreign files are replaced, and named on stderr before that."""
    force(info if allowed else None)


def prompt_text(completion: Completion, tokenizer: Any) -> str:
    """The prompt as text; a rendered conversation shows its special tokens."""
    if isinstance(completion.prompt, str):
        return completion.prompt
    return str(tokenizer.decode(completion.prompt))


def completion_record(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """A completion as JSON knows it; the names are those of the Python API."""
    names = ("text", "token_ids", "logprobs", "finish_reason", "index", "lossy")
    return {
        "prompt": prompt_text(completion, tokenizer),
        **{name: getattr(completion, name) for name in names},
        "stats": {k: v for k, v in vars(completion.stats).items() if k != "arrivals"},
        **({} if completion.error is None else {"error": completion.error}),
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
        # Here, because it loads tokenizers, which --help need not.
        from paceline.request.detokenise import Detokeniser

        self._detokeniser = Detokeniser(tokenizer, prompt)
        self._coloured = coloured
        self._styles: deque[str] = deque()  # of characters that were not shown yet
        self._last = TARGET_STYLE

    def paint(self, text: str, token_ids: Iterable[int], from_draft: Iterable[bool]) -> Text:
        """The new text as styled runs; call once for every event, in order."""
        if not self._coloured:
            return Text(text)
        for token, drafted in zip(token_ids, from_draft, strict=True):
            self._last = DRAFT_STYLE if drafted else TARGET_STYLE
            self._styles.extend([self._last] * len(self._detokeniser.feed(token)))
        painted = Text()
        for style, run in groupby(text, lambda character: self._next_style()):
            painted.append("".join(run), style)
        return painted

    def _next_style(self) -> str:
        """An unfinished character at the text's end belongs to its last token."""
        return self._styles.popleft() if self._styles else self._last


def stream_to(
    console: Console,
    llm: LLM,
    prompts: Sequence[str] | Sequence[list[int]],
    params: SamplingParams,
    show_draft: bool,
) -> list[Completion]:
    """Print completions as they grow (a single one) or as they finish (several)."""
    single = len(prompts) == 1 and params.n == 1
    completions: list[Completion] = []

    def painter(number: int) -> Painter:
        prompt = prompts[number]
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Painter(llm.tokenizer, show_draft, ids)

    growing = painter(0)
    for event in llm.stream(prompts, params):
        if single:
            text = growing.paint(event.text, event.token_ids, event.from_draft)
            console.print(text, end="", soft_wrap=True, highlight=False)
        if event.completion is None:
            continue
        completion = event.completion
        completions.append(completion)
        if single:
            console.print()
            continue
        title = prompt_text(completion, llm.tokenizer).strip().split("\n", 1)[0]
        title = title if len(title) <= 60 else f"{title[:57]}..."
        console.rule(Text(title, style="dim"), align="left")
        whole = completion.text, completion.token_ids, completion.draft_mask
        console.print(painter(event.request).paint(*whole), soft_wrap=True, highlight=False)
    return completions
