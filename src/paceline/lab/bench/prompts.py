"""Prompts to measure with: the shipped ones, or files in the formats of docs/guides/prompts.md and
of public benchmarks. The format of a record is recognised by its fields; a file may mix formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import DataError
from paceline.llm import LLM

Element = TypeVar("Element")
# Room for the nodes of a draft: more than the largest step whose cost is measured at start-up.
_DRAFT_ROOM = 96
_TEXT_SUFFIXES = (".txt", ".md", ".text")
_SEPARATOR = re.compile(r"^[^\S\n]*---[^\S\n]*$", re.MULTILINE)


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its location ("prompts.jsonl, line 3"). Plain text (.txt,
    .md, .text) is split at lines of ``---`` into records ``{"text": ...}``. Other files are JSONL.
    Raises DataError."""
    text = _text_of(file)
    if file.suffix.lower() in _TEXT_SUFFIXES:
        parts = (part.strip("\n") for part in _SEPARATOR.split("\n".join(text.splitlines())))
        for number, part in enumerate((part for part in parts if part.strip()), 1):
            yield f"{file}, part {number}", {"text": part}
        return
    # ``splitlines`` would be wrong: JSON strings may contain U+2028 and other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: not JSON ({getattr(error, 'msg', error)}); write one "
                "object per line, or let the name of a plain text file end in .txt"
            ) from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object; each record is one, with a prompt")
        yield where, record


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror or error}; check the path"
    raise DataError(reason)


_SHIPPED = Path(__file__).with_name("shipped")
_FIELDS = ("turns", "messages", "question", "prompt", "text")


@dataclass(frozen=True)
class BenchPrompt:
    """``text``: a user's message if ``chat``, otherwise text to continue. ``earlier``: the messages
    before it, as (role, content)."""

    name: str
    category: str
    text: str
    chat: bool
    earlier: tuple[tuple[str, str], ...] = ()

    def encode(self, llm: LLM) -> list[int]:
        """Token ids for the target, in its chat template. Without a template, or unless ``chat``,
        the texts are joined by blank lines. Raises PromptError if the template refuses them."""
        messages = [*self.earlier, ("user", self.text)]
        if self.chat and llm.tokenizer.chat_template is not None:
            return llm.render_chat([{"role": role, "content": text} for role, text in messages])
        text = "\n\n".join(text for _, text in messages)
        return [int(token) for token in llm.tokenizer(text)["input_ids"]]


def load_prompts(
    source: str | Path | None = None,
    categories: Sequence[str] = (),
    per_category: int | None = None,
) -> list[BenchPrompt]:
    """The prompts of a file (None: the shipped ones), ordered by category.
    ``per_category`` limits their number by taking evenly spaced ones. Raises DataError for an
    unreadable file, a record without a prompt, an unknown category, or if no prompt is left."""
    files = sorted(_SHIPPED.glob("*.jsonl")) if source is None else [Path(source)]
    numbered = ((file, *item) for file in files for item in enumerate(read_records(file)))
    prompts = [_prompt(file, number, *item) for file, number, item in numbered]
    where = source or "the shipped prompt set"
    if not prompts:
        raise DataError(f"{where} has no prompts; add at least one")
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    unknown = ", ".join(sorted(set(categories) - set(known)))
    if unknown:
        raise DataError(f"no category {unknown} in {where}; there are: {', '.join(known)}")
    return [
        prompt
        for name in known
        if name in (categories or known)
        for prompt in evenly([p for p in prompts if p.category == name], per_category)
    ]


def evenly(items: Sequence[Element], count: int | None) -> list[Element]:
    """``count`` evenly spaced items; all if there are fewer, or ``count`` is None."""
    count = len(items) if count is None else min(count, len(items))
    return [items[n * len(items) // count] for n in range(count)]


def interleave(items: Iterable[Element], key: Callable[[Element], object]) -> list[Element]:
    """Order items so that their kinds (``key``) alternate: any beginning has all kinds."""
    kinds: dict[object, list[Element]] = {}
    for item in items:
        kinds.setdefault(key(item), []).append(item)
    return [item for group in zip_longest(*kinds.values()) for item in group if item is not None]


def fit(
    prompts: Sequence[BenchPrompt],
    llm: LLM,
    max_tokens: int,
    cure: str = "shorter prompts or a smaller --max-tokens",
) -> tuple[list[tuple[BenchPrompt, list[int]]], list[str]]:
    """The prompts that fit into the context with ``max_tokens`` new tokens, with their token ids,
    and the names of the others. ``cure``: what the error advises. Raises DataError if none fits,
    and PromptError if the chat template refuses a conversation."""
    encoded = [(prompt, prompt.encode(llm)) for prompt in prompts]
    room = llm.max_model_len - max_tokens
    fitting = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) <= room]
    if not fitting:
        shortest = min((len(ids) for _, ids in encoded), default=0)
        raise DataError(
            f"no prompt leaves room for {max_tokens} new tokens in the context of "
            f"{llm.target.name}, {llm.max_model_len} tokens: the shortest prompt has {shortest}; "
            f"give {cure}"
        )
    return fitting, [prompt.name for prompt, ids in encoded if not 0 < len(ids) <= room]


def tokens_needed(llm: LLM, prompts: Iterable[Sequence[int]], max_tokens: int) -> int:
    """The ``max_model_len`` that an engine needs for these prompts, their answers and drafts. A
    cache for full contexts would take gigabytes, and seconds to clear."""
    return min(llm.max_model_len, max(map(len, prompts)) + max_tokens + _DRAFT_ROOM)


def _prompt(file: Path, number: int, where: str, record: dict[str, Any]) -> BenchPrompt:
    """Parse a record of any format. Raises DataError."""
    field = next((key for key in _FIELDS if record.get(key) is not None), None)
    if field is None:
        raise DataError(f"{where}: none of the fields {', '.join(_FIELDS)}; one holds the prompt")
    *earlier, (_, text) = _messages(record[field], field, where)
    category, chat = _category_and_chat(record, field)
    category = record.get("category", category)
    if not isinstance(category, str) or not category:
        raise DataError(f"{where}: the category is {category!r}; it must be a name")
    style = record.get("format", "chat" if chat else "completion")
    if style not in ("chat", "completion"):
        raise DataError(f"{where}: the format is {style!r}; use chat or completion")
    if not text.strip():
        raise DataError(f"{where}: the prompt is empty; give it text or remove the record")
    ids = (record[key] for key in ("id", "question_id", "task_id") if key in record)
    prompt_id = next(ids, number)
    stem = file.name.split(".")[0]
    name = f"{stem}/{prompt_id}" if isinstance(prompt_id, int) else str(prompt_id)
    return BenchPrompt(name, category, text, style == "chat", tuple(earlier))


def _category_and_chat(record: dict[str, Any], field: str) -> tuple[str, bool]:
    """Defaults for a record that does not name its category or format."""
    if field == "question":  # GSM8K
        return "arithmetic", True
    # HumanEval has string ids, and functions to complete; MBPP has numbers, and instructions.
    if "task_id" in record:
        return "code", isinstance(record["task_id"], int)
    if field in ("turns", "messages") or isinstance(record[field], list):
        return "chat", True
    return "text", False


def _messages(value: object, field: str, where: str) -> list[tuple[str, str]]:
    """(role, content) up to the user's last message, or the first of a text or of several turns,
    which are texts or objects with ``content``."""
    items = value if isinstance(value, list) else [value]
    if field != "messages":
        turns = [_content(item) for item in items]
        if not turns or None in turns:
            raise DataError(f"{where}: {field} must be a text or a list of texts")
        return [("user", str(turns[0]))]
    messages: list[tuple[str, str]] = []
    for item in items:
        role, content = item.get("role") if isinstance(item, dict) else None, _content(item)
        if not isinstance(role, str) or content is None:
            raise DataError(f"{where}: every message needs a role and a content of text")
        messages.append((role, content))
    while messages and messages[-1][0] == "assistant":
        messages.pop()
    if not messages or messages[-1][0] != "user":
        raise DataError(f"{where}: the conversation has no message of a user to answer")
    return messages


def _content(item: object) -> str | None:
    """The text of a message: the message itself or its ``content``, which may be in parts."""
    content = item.get("content") if isinstance(item, dict) else item
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else None
