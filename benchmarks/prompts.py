"""The in-domain prompt suites as token ids, the same for every engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import DataError
from paceline.lab.bench.prompts import BenchPrompt, load_prompts
from paceline.llm import LLM

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"  # beside a checkout
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


def read_suites(folder: str | Path, names: Sequence[str]) -> dict[str, list[BenchPrompt]]:
    """{suite: its prompts}, or shipped prompts if its file is missing. No text is used twice, since
    some drafters learn from earlier texts. Exits with a message if there is neither."""
    seen: set[str] = set()
    suites = {}
    for name in names:
        path, category = _source(folder, name)
        if not path.is_file() and name not in SHIPPED:
            raise SystemExit(f"error: there is no {path}, and no shipped prompts for {name!r}")
        file, category = (path, category) if path.is_file() else (None, SHIPPED[name])
        try:
            prompts = load_prompts(file, [category] if category else [])
        except DataError as error:
            raise SystemExit(f"error: {error}") from None
        suites[name] = [prompt for prompt in prompts if prompt.text not in seen]
        seen |= {prompt.text for prompt in prompts}
    return suites


def available_suites(folder: str | Path, suites: Sequence[str]) -> list[str]:
    """The suites with a file or shipped prompts; if there are none, all shipped suites. A message
    names those that are left out."""
    missing = [name for name in suites if not _source(folder, name)[0].is_file()]
    kept = [name for name in suites if name not in missing or name in SHIPPED]
    if left := [name for name in missing if name not in SHIPPED]:
        instead = "" if kept else f"; using the shipped prompts of {', '.join(SHIPPED)}"
        print(f"left out {', '.join(left)}: not in {folder}{instead}", file=sys.stderr)
    return kept or [*SHIPPED]


def _source(folder: str | Path, suite: str) -> tuple[Path, str | None]:
    """The file of a suite, and its category if the file has several suites."""
    file, category = PARTS.get(suite, (suite, None))
    return Path(folder) / f"{file}.jsonl", category


def load_suites(
    folder: str | Path, names: Sequence[str], llm: LLM, limit: int, chat: bool = False
) -> dict[str, list[list[int]]]:
    """{suite: token ids of its prompts}; with ``chat`` all are user messages. Prompts longer than
    ``limit`` tokens are left out with a message. Exits if none is left."""
    suites = {}
    for name, prompts in read_suites(folder, names).items():
        encoded = [replace(p, chat=chat or p.chat).encode(llm) for p in prompts]
        suites[name] = [ids for ids in encoded if len(ids) <= limit]
        if not suites[name]:
            raise SystemExit(f"error: all prompts of {name} have more than {limit} tokens")
        if left := len(encoded) - len(suites[name]):
            print(
                f"{name}: {left} of {len(encoded)} prompts are too long and left out",
                file=sys.stderr,
            )
    return suites
