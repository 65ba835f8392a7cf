"""Prompts to measure on: our own, shipped with the package, or the user's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.llm import LLM

_SHIPPED = Path(__file__).with_name("shipped")


@dataclass(frozen=True)
class Prompt:
    """What a user would send: ``text``, as a chat turn or as text to go on from."""

    name: str
    category: str
    text: str
    chat: bool

    def encode(self, llm: LLM) -> list[int]:
        """Token ids as the target sees them; chats go through its template if it has one."""
        if self.chat and llm.tokenizer.chat_template is not None:
            return llm.render_chat([{"role": "user", "content": self.text}])
        return [int(token) for token in llm.tokenizer(self.text)["input_ids"]]


def load_prompts(
    source: str | Path | None = None,
    categories: Sequence[str] = (),
    per_category: int | None = None,
) -> list[Prompt]:
    """Prompts of a file (or, with None, our own), of all or some categories, in file order.

    ``per_category`` takes so many of each, evenly spread. Raises DataError, in one line, for an
    unreadable file, an unknown category, or if nothing is left.
    """
    files = sorted(_SHIPPED.glob("*.jsonl")) if source is None else [Path(source)]
    prompts = [prompt for file in files for prompt in _read(file)]
    known = sorted({prompt.category for prompt in prompts})
    unknown = sorted(set(categories) - set(known))
    if unknown:
        raise DataError(f"no category {', '.join(unknown)}; there are: {', '.join(known)}")
    wanted = [name for name in known if not categories or name in categories]
    chosen: list[Prompt] = []
    for name in wanted:
        own = [prompt for prompt in prompts if prompt.category == name]
        count = len(own) if per_category is None else min(per_category, len(own))
        chosen.extend(own[i * len(own) // count] for i in range(count))
    if not chosen:
        raise DataError(f"{source or 'the shipped prompt set'} has no prompts; add at least one")
    return chosen


def _read(file: Path) -> list[Prompt]:
    prompts = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        chat = record["format"] == "chat"
        prompts.append(Prompt(record["id"], record["category"], record["turns"][0], chat))
    return prompts
