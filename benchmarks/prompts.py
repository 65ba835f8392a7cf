"""The in-domain prompt suites as token ids, the same for every engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.lab.bench.prompts import load_prompts

ALL_SUITES = ("stories", "arith", "chat", "stdlib", "summ")

# Prompt files that hold several suites: (file, its category).
PARTS = {
    name: ("spec_bench", name)
    for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
}

# For a checkout without the prompts folder: categories of the shipped prompts instead.
SHIPPED = {
    "stories": "creative_writing",
    "arith": "arithmetic",
    "chat": "chat",
    "stdlib": "code",
    "summ": "summarisation",
}


def default_folder() -> Path:
    """Where the prompt files lie beside a checkout."""
    return Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"


def read_texts(folder: str | Path, suite: str) -> list[tuple[str, str]]:
    """(format, first turn) of every record; shipped prompts where the file is missing."""
    category = PARTS.get(suite, (suite, None))[1]
    path = _file(folder, suite)
    if not path.is_file():
        if suite not in SHIPPED:
            raise SystemExit(f"error: no {path}, and no shipped prompts for {suite!r}")
        shipped = load_prompts(None, [SHIPPED[suite]])
        return [("chat" if prompt.chat else "completion", prompt.text) for prompt in shipped]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = [r for r in records if category is None or r["category"] == category]
    if not chosen:
        raise SystemExit(f"error: {path} has no prompts of {suite}")
    return [(r["format"], r["turns"][0]) for r in chosen]


def at_hand(folder: str | Path, suites: Sequence[str]) -> list[str]:
    """Those whose file is there, the others named in one line; if none is, shipped ones."""
    missing = [name for name in suites if not _file(folder, name).is_file()]
    kept = [name for name in suites if name not in missing or name in SHIPPED]
    if left := [name for name in missing if name not in SHIPPED]:
        instead = "" if kept else f"; taking shipped prompts of {', '.join(SHIPPED)}"
        print(f"left out {', '.join(left)}: not in {folder}{instead}", file=sys.stderr)
    return kept or [*SHIPPED]


def _file(folder: str | Path, suite: str) -> Path:
    return Path(folder) / f"{PARTS.get(suite, (suite, None))[0]}.jsonl"


def encode(tokenizer: Any, form: str, text: str) -> list[int]:
    """Token ids of a prompt: chats through the chat template, completions as they are."""
    if form == "chat" and tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(rendered, add_special_tokens=False).input_ids)
    return list(tokenizer(text).input_ids)


def load_suites(
    folder: str | Path, names: Sequence[str], tokenizer: Any, limit: int
) -> dict[str, list[list[int]]]:
    """{suite: token ids of its prompts}, those longer than `limit` tokens left out."""
    return {
        name: [
            ids
            for form, text in read_texts(folder, name)
            if len(ids := encode(tokenizer, form, text)) <= limit
        ]
        for name in names
    }
