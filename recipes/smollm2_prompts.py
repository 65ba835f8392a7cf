"""Prompts for a chat model to answer: chat, code, mathematics, summaries and stories.

    python recipes/smollm2_prompts.py DATA_FOLDER OUT.jsonl [COUNT]

Reads ``*.train.jsonl.gz`` of the corpus and writes records ``{"messages", "task", "source",
"license"}`` with one question each. The corpora's answers are left out, because the target
generates the answers. Records under share-alike licences are skipped. Output is reproducible."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Questions about a text that comes without one.
ABOUT_TEXT = (
    "Summarize: {}",
    "Summarize: {}",
    "Summarize: {}",
    "Summarize the following text in a few sentences.\n\n{}",
    "{}\n\nWhat is the main point of this text?",
    "Write a short summary of this passage.\n\n{}",
    "Read this and list the key points.\n\n{}",
    "What is this text about?\n\n{}",
)
ON_A_STORY = (
    "Continue this story.\n\n{}",
    "Write a short story that begins like this:\n\n{}",
    "Tell me a story. Start with: {}",
    "Write a blog post inspired by this scene: {}",
    "Rewrite this passage in modern English.\n\n{}",
)
ON_A_FUNCTION = (
    "{}",
    "{}",
    "{}",
    "Complete this Python function.\n\n{}",
    "Write the body of the following function:\n\n```python\n{}```",
    "Explain what this function does and implement it.\n\n{}",
)
_TURN = re.compile(r"(?:\A|\n\n)(User|Assistant): ")
_STUB = re.compile(r'^def \w+\([^\n]*\):\n    """.+?"""\n', re.S | re.M)


def corpus(folder: Path, name: str) -> Path:
    return folder / f"{name}.train.jsonl.gz"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a corpus file in order, without those under share-alike licences."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if not any(mark in record["license"] for mark in ("-SA", "CDLA")):
                yield record


def first_question(text: str) -> str | None:
    """The first user turn of a conversation; None for other text."""
    pieces = _TURN.split(text)
    return pieces[2].strip() if len(pieces) > 4 and pieces[1] == "User" else None


def passage(text: str, rng: random.Random, words: tuple[int, int]) -> str:
    """Random consecutive paragraphs, whose number of words is about within the range ``words``."""
    paragraphs = [p.strip() for p in text.split("\n\n") if p.strip()]
    wanted, start = rng.randint(*words), rng.randrange(len(paragraphs))
    taken: list[str] = []
    for paragraph in paragraphs[start:]:
        taken.append(paragraph)
        if sum(len(p.split()) for p in taken) >= wanted:
            break
    return " ".join("\n\n".join(taken).split(" ")[: words[1]])


def asked(record: dict[str, Any], rng: random.Random) -> str | None:
    return first_question(record["text"])


def summary(record: dict[str, Any], rng: random.Random) -> str | None:
    text = passage(record["text"], rng, (80, 380))
    return rng.choice(ABOUT_TEXT).format(text) if len(text.split()) > 40 else None


def story(record: dict[str, Any], rng: random.Random) -> str:
    return rng.choice(ON_A_STORY).format(passage(record["text"], rng, (10, 70)))


def function(record: dict[str, Any], rng: random.Random) -> str | None:
    stubs = [stub for stub in _STUB.findall(record["text"]) if 80 < len(stub) < 1500]
    return rng.choice(ON_A_FUNCTION).format(rng.choice(stubs)) if stubs else None


Asker = Callable[[dict[str, Any], random.Random], str | None]

# Task, corpus file, function that makes a question, share, and the sources used of the file.
PLAN: tuple[tuple[str, str, Asker, float, tuple[str, ...]], ...] = (
    ("chat", "chat", asked, 19, ("GPTeacher", "self-instruct")),
    ("questions", "chat", asked, 6, ("FairytaleQA", "tldr-pages")),
    ("dialogue", "chat", asked, 2, ("Taskmaster",)),
    ("code", "code", asked, 9, ("GPTeacher", "google-research")),
    ("functions", "code", function, 12, ("cpython",)),
    ("math", "math", asked, 22, ("grade-school",)),
    ("math", "math", asked, 3, ("TAL",)),
    ("summaries", "summ", asked, 6, ("",)),
    ("summaries", "books", summary, 8, ("",)),
    ("summaries", "docs", summary, 6, ("peps", "rust", "EIPs")),
    ("stories", "books", story, 4, ("",)),
    ("stories", "stories", story, 3, ("",)),
)


def prompts(folder: Path, count: int) -> list[dict[str, Any]]:
    """``count`` shuffled prompts, in the shares of ``PLAN``."""
    rng = random.Random(0)
    whole = sum(share for *_, share, _ in PLAN)
    made: list[dict[str, Any]] = []
    for task, name, ask, share, sources in PLAN:
        every = [
            record
            for record in records(corpus(folder, name))
            if any(source in record["source"] for source in sources)
        ]
        wanted, taken, rounds = round(count * share / whole), 0, 0
        seen: set[str] = set()
        # A text may be used several times, with other questions and passages.
        while taken < wanted and rounds < 4:
            rng.shuffle(every)
            for record in every:
                question = ask(record, rng)
                if taken == wanted:
                    break
                if not question or question in seen or not 8 <= len(question) <= 2600:
                    continue
                seen.add(question)
                taken += 1
                made.append(
                    {
                        "messages": [{"role": "user", "content": question}],
                        "task": task,
                        "source": record["source"],
                        "license": record["license"],
                    }
                )
            rounds += 1
    rng.shuffle(made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts for a chat model to answer.")
    parser.add_argument("data", type=Path, help="folder with chat.train.jsonl.gz and the others")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("count", type=int, nargs="?", default=20000, help="prompts (20000)")
    args = parser.parse_args()
    missing = [
        name for name in sorted({row[1] for row in PLAN}) if not corpus(args.data, name).is_file()
    ]
    if missing:
        parser.error(
            f"{args.data} has no {', '.join(f'{name}.train.jsonl.gz' for name in missing)}"
        )
    made = prompts(args.data, args.count)
    lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in made)
    args.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(made)} prompts in {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
