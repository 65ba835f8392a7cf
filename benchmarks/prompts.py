"""The in-domain prompt suites as token ids, the same for every contestant."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.lab.bench.prompts import evenly, load_prompts
from paceline.lab.bench.runner import in_turn

if TYPE_CHECKING:
    from paceline.llm import LLM

SUITES = ("stories", "arith", "chat", "stdlib")  # of the decoding benchmark
ALL_SUITES = (*SUITES, "summ")

# Prompt files that hold several suites: (file, its category).
PARTS = {
    name: ("spec_bench", name)
    for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
}

# A few of our own, for a checkout without the prompts folder: (format, text).
BUILT_IN: dict[str, list[tuple[str, str]]] = {
    "stories": [
        ("completion", "Once upon a time there was a little fox who lived near a river. One day"),
        ("completion", "Anna and Tom went to the park with their red ball. The sun was warm."),
        ("completion", "The old king had three sons. The youngest said,"),
        ("completion", "It was raining, and the small bear could not find his mother."),
    ],
    "arith": [
        ("chat", "A box holds 12 pencils. How many pencils are in 7 boxes?"),
        ("chat", "What is 345 + 278?"),
        ("chat", "Sara has 50 coins and gives away 18. How many coins are left?"),
        ("chat", "A garden is 9 meters long and 6 meters wide. What is its area?"),
    ],
    "chat": [
        ("chat", "Give three tips for staying healthy."),
        ("chat", "Write a short letter to a friend about a holiday by the sea."),
        ("chat", "What is the difference between a city and a village?"),
        ("chat", "I would like to book a table for two tonight."),
    ],
    "stdlib": [
        ("completion", 'def gcd(a, b):\n    """Return the greatest common divisor."""\n'),
        ("completion", "class Stack:\n    def __init__(self):\n        self.items = []\n\n"),
        ("completion", 'def is_prime(n):\n    """Return True if n is a prime number."""\n'),
        ("completion", "import os\n\ndef walk_files(path):\n"),
    ],
    "summ": [
        (
            "chat",
            "Summarize: The meeting began at nine. Anna wants a bigger remote control. Tom "
            "says that a bigger remote control costs too much. They agree to ask the users.",
        ),
        (
            "chat",
            "Summarize: The fox saw the grapes and jumped. The grapes hung too high. The fox "
            "went away and said that the grapes were sour.",
        ),
        (
            "chat",
            "What was said about money? The project has money for one year. Anna asked for "
            "money for a second year. The project leader will decide about the money in May.",
        ),
        (
            "chat",
            "Give the text a title: We train a small model to guess the words of a large "
            "model. The large model checks the guesses. The text is the same, only sooner.",
        ),
    ],
}


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized once for all contestants."""

    suite: str
    token_ids: list[int]


def default_folder() -> Path:
    """Where the prompt files lie beside a checkout."""
    return Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"


def read_texts(folder: str | Path, suite: str) -> list[tuple[str, str]]:
    """(format, first turn) of every record; our own few where the file is missing."""
    category = PARTS.get(suite, (suite, None))[1]
    path = _file(folder, suite)
    if not path.is_file():
        if suite not in BUILT_IN:
            raise SystemExit(f"error: no {path}, and no built-in prompts for {suite!r}")
        return BUILT_IN[suite]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = [r for r in records if category is None or r["category"] == category]
    if not chosen:
        raise SystemExit(f"error: {path} has no prompts of {suite}")
    return [(r["format"], r["turns"][0]) for r in chosen]


def at_hand(folder: str | Path, suites: Sequence[str]) -> list[str]:
    """Those whose file is there, the others named in one line; if none is, our own few."""
    missing = [name for name in suites if not _file(folder, name).is_file()]
    found = [name for name in suites if name not in missing or name in BUILT_IN]
    if left := [name for name in missing if name not in BUILT_IN]:
        instead = "" if found else f"; taking our own few prompts of {', '.join(BUILT_IN)}"
        print(f"left out {', '.join(left)}: not in {folder}{instead}", file=sys.stderr)
    return found or [*BUILT_IN]


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
    folder: str | Path, names: list[str], tokenizer: Any, per_suite: int, limit: int
) -> dict[str, list[Prompt]]:
    """{suite: prompts}, those longer than `limit` tokens left out."""
    suites = {}
    for name in names:
        encoded = [encode(tokenizer, form, text) for form, text in read_texts(folder, name)]
        fitting = [ids for ids in encoded if len(ids) <= limit]
        suites[name] = [Prompt(name, ids) for ids in evenly(fitting, per_suite or None)]
    return suites


def mixed(llm: LLM, source: str | None, limit: int) -> list[list[int]]:
    """The shipped prompts, or a file's, of at most ``limit`` tokens: one of each category in turn,
    as long as there are any."""
    found = [(prompt.category, prompt.encode(llm)) for prompt in load_prompts(source)]
    fitting = [pair for pair in found if len(pair[1]) <= limit]
    if not fitting:
        raise SystemExit(f"error: no prompt fits into {limit} tokens")
    return [ids for _, ids in in_turn(fitting, lambda pair: pair[0])]
