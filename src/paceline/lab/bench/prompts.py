"""Prompts to measure on: shipped ones, the user's files in the layouts of docs/guides/prompts.md,
or the questions of public benchmarks. A record is recognised by its fields: a file may mix them."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError, DataError
from paceline.llm import LLM

Element = TypeVar("Element")
_DRAFTED = 96  # tokens of a draft; more than start-up measures steps of
_TEXT = (".txt", ".md", ".text")
_SEPARATOR = re.compile(r"^[^\S\n]*---[^\S\n]*$", re.MULTILINE)


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, and where they stand ("prompts.jsonl, line 3"). Plain text (.txt, .md,
    .text) gives records ``{"text": ...}``, one for each part between lines of ``---``. All else is
    JSON: an object a line, a list of objects, or one object. Raises DataError."""
    text = _text_of(file)
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if suffix.lower() in _TEXT:
        parts = (part.strip("\n") for part in _SEPARATOR.split("\n".join(text.splitlines())))
        for number, part in enumerate((part for part in parts if part.strip()), 1):
            yield f"{file}, part {number}", {"text": part}
        return
    try:
        whole = json.loads(text)
    except ValueError:
        kind, records = "line", _lines(file, text)
    else:
        several = isinstance(whole, list)
        kind, records = "item" if several else "line", enumerate(whole if several else [whole], 1)
    for number, record in records:
        where = f"{file}, {kind} {number}"
        if not isinstance(record, dict):
            raise DataError(f"{where}: no JSON object; each record is one, with a prompt")
        yield where, record


def _lines(file: Path, text: str) -> Iterable[tuple[int, Any]]:
    """JSON by line number. Not splitlines: strings may hold U+2028 and its like as they are."""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{file}, line {number}: not JSON ({getattr(error, 'msg', error)}); write one "
                "object a line, or name a file of plain text .txt"
            ) from None


def _text_of(file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8-sig")
    except FileNotFoundError:
        reason = f"there is no file {file}; check the path"
    except IsADirectoryError:
        reason = f"{file} is a folder; give one file of prompts"
    except UnicodeDecodeError as error:
        reason = f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        reason = f"{file} is not a whole gzip file ({error}); pack it again"
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror or error}"
    raise DataError(reason)


_SHIPPED = Path(__file__).with_name("shipped")
_FIELDS = ("turns", "messages", "question", "prompt", "text")


@dataclass(frozen=True)
class BenchPrompt:
    """``text``: a chat turn, or text to go on from. ``turns``: all the user's turns, of which it is
    the first. ``earlier``: what was said before, as (role, content)."""

    name: str
    category: str
    text: str
    chat: bool
    turns: tuple[str, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()

    def encode(self, llm: LLM) -> list[int]:
        """Token ids as the target sees them. Raises what ``render`` raises."""
        return render(llm, [*self.earlier, ("user", self.text)], self.chat)


def render(llm: LLM, messages: Sequence[tuple[str, str]], chat: bool = True) -> list[int]:
    """Token ids through the chat template; without one, and of what is no ``chat``, those of the
    texts, a blank line between. Raises PromptError if the template refuses the conversation."""
    if chat and llm.tokenizer.chat_template is not None:
        return llm.render_chat([{"role": role, "content": message} for role, message in messages])
    text = "\n\n".join(message for _, message in messages)
    return [int(token) for token in llm.tokenizer(text)["input_ids"]]


def load_prompts(
    source: str | Path | None = None,
    categories: Sequence[str] = (),
    per_category: int | None = None,
) -> list[BenchPrompt]:
    """Prompts of a file (None: our own), category by category; names are unique. ``per_category``
    takes so many of a category, evenly spread. Raises DataError for an unreadable file, a record
    without a prompt, an unknown category, or if nothing is left, ConfigError for a
    ``per_category`` below 1."""
    if per_category is not None and per_category < 1:
        raise ConfigError(f"per_category is {per_category}; use at least 1")
    files = sorted(_SHIPPED.glob("*.jsonl")) if source is None else [Path(source)]
    numbered = ((file, *item) for file in files for item in enumerate(read_records(file)))
    prompts = _unique([_prompt(file, number, *item) for file, number, item in numbered])
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
    """``count`` of them, evenly spread; all where there are no more, or None is asked for."""
    count = len(items) if count is None else min(count, len(items))
    return [items[n * len(items) // count] for n in range(count)]


def in_turn(items: Iterable[Element], key: Callable[[Element], object]) -> list[Element]:
    """One of each kind in turn, so that any beginning of the list has all kinds."""
    kinds: dict[object, list[Element]] = {}
    for item in items:
        kinds.setdefault(key(item), []).append(item)
    return [item for row in zip_longest(*kinds.values()) for item in row if item is not None]


def fit(
    prompts: Sequence[BenchPrompt],
    llm: LLM,
    max_tokens: int,
    cure: str = "shorter prompts or a smaller --max-tokens",
) -> tuple[list[tuple[BenchPrompt, list[int]]], list[str]]:
    """The prompts that leave the target room for ``max_tokens``, with their ids, and the names of
    the others. Raises DataError if none does, and PromptError if the chat template refuses a
    conversation."""
    encoded = [(prompt, prompt.encode(llm)) for prompt in prompts]
    room = llm.max_model_len - max_tokens
    fitting = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) <= room]
    if not fitting:
        shortest = min((len(ids) for _, ids in encoded), default=0)
        raise DataError(
            f"no prompt leaves room for {max_tokens} tokens in the {llm.max_model_len} that "
            f"{llm.target.name} sees: the shortest has {shortest}; give {cure}"
        )
    return fitting, [prompt.name for prompt, ids in encoded if not 0 < len(ids) <= room]


def tokens_needed(llm: LLM, prompts: Iterable[Sequence[int]], max_tokens: int) -> int:
    """``max_model_len`` of an engine for these prompts: the longest with its answer and drafts. To
    zero a cache for full contexts takes seconds and gigabytes."""
    return min(llm.max_model_len, max(map(len, prompts)) + max_tokens + _DRAFTED)


def _prompt(file: Path, number: int, where: str, record: dict[str, Any]) -> BenchPrompt:
    """Of the record of any layout. Raises DataError."""
    field = next((key for key in _FIELDS if record.get(key) is not None), None)
    if field is None:
        raise DataError(f"{where}: none of the fields {', '.join(_FIELDS)}; one holds the prompt")
    earlier: list[tuple[str, str]] = []
    if field == "messages":
        *earlier, (_, text) = _conversation(record[field], where)
        turns: tuple[str, ...] = (text,)
    else:
        turns = _turns(record[field], field, where)
    category, chat = _nature(record, field)
    category = record.get("category", category)
    if not isinstance(category, str) or not category:
        raise DataError(f"{where}: the category is {category!r}; it must be a name")
    style = record.get("format", "chat" if chat else "completion")
    if style not in ("chat", "completion"):
        raise DataError(f"{where}: the format is {style!r}; use chat or completion")
    if not turns[0].strip():
        raise DataError(f"{where}: the prompt is empty; give it text or remove the record")
    ids = (record[key] for key in ("id", "question_id", "task_id") if key in record)
    given = next(ids, number)
    name = f"{file.name.split('.')[0]}/{given}" if isinstance(given, int) else str(given)
    return BenchPrompt(name, category, turns[0], style == "chat", turns, tuple(earlier))


def _nature(record: dict[str, Any], field: str) -> tuple[str, bool]:
    """Category, and whether it is a chat turn, of a record that does not say so itself."""
    if field == "question":  # GSM8K
        return "arithmetic", True
    if "task_id" in record:  # HumanEval's names begin a function; MBPP's numbers are instructions
        return "code", isinstance(record["task_id"], int)
    if field in ("turns", "messages") or isinstance(record[field], list):
        return "chat", True
    return "text", False


def _turns(value: object, field: str, where: str) -> tuple[str, ...]:
    """A text, or a list of texts or of objects with ``content``."""
    turns = [_content(item) for item in (value if isinstance(value, list) else [value])]
    if not turns or None in turns:
        raise DataError(f"{where}: {field} must be a text or a list of texts")
    return tuple(map(str, turns))


def _conversation(value: object, where: str) -> list[tuple[str, str]]:
    """(role, content) up to the last user's message; the answer that a record has is dropped."""
    messages: list[tuple[str, str]] = []
    for item in value if isinstance(value, list) else []:
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
    """A text, or the ``content`` of an object: a text or parts of one."""
    content = item.get("content") if isinstance(item, dict) else item
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else None


def _unique(prompts: list[BenchPrompt]) -> list[BenchPrompt]:
    """Names that occur again get a number: results are kept by name."""
    counts = Counter[str]()
    for index, prompt in enumerate(prompts):
        counts[prompt.name] += 1
        if counts[prompt.name] > 1:
            prompts[index] = replace(prompt, name=f"{prompt.name}#{counts[prompt.name]}")
    return prompts
