"""``paceline datastore build``: files of text, records and answers; one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.draft.datastore import Store
from paceline.model.tokenizer import load_tokenizer
from support.command_lines import paceline

STORY = "Once upon a time there was a little dog who loved to play in the park."
TALK = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": STORY}]


def build(out: Path, *arguments: str) -> dict[str, object]:
    result = paceline(
        "datastore", "build", *arguments, "--model", "paceline/tiny", "--out", str(out), "--json"
    )
    assert result.exit_code == 0, result.stderr
    record: dict[str, object] = json.loads(result.stdout)
    return record


def words(out: Path) -> str:
    store, tokenizer = Store(out, 1 << 20), load_tokenizer("paceline/tiny")
    return tokenizer.decode([n for n in store.ids[::-1].tolist() if n < len(tokenizer)])


def test_texts_and_what_drafts_with_them(tmp_path: Path) -> None:
    text, records, out = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.datastore"))
    text.write_text(f"{STORY}\n")
    records.write_text(json.dumps({"text": STORY}))
    made = build(out, str(text), str(records))
    assert made["bytes"] == out.stat().st_size and made["file"] == str(out)
    assert words(out).count("loved to play") == 2
    drafted = paceline(
        *("generate", "Once upon a time there was a little", "--model", "paceline/tiny"),
        *("--draft", f"hybrid:suffix+datastore:{out}", "--max-tokens", "9", "--json"),
    )
    assert drafted.exit_code == 0 and json.loads(drafted.stdout)["text"]


def test_of_conversations_only_the_answers(tmp_path: Path) -> None:
    file, whole, answers = (tmp_path / name for name in ("a.jsonl", "all", "answers"))
    record = json.dumps({"messages": TALK, "license": "MIT"})
    other = json.dumps({"messages": TALK, "license": "CC-BY-SA"})
    file.write_text(f"{record}\n{record}\n{other}\n")
    build(whole, str(file), "--exclude-license", "SA")
    build(answers, str(file), "--from-answers")
    assert words(whole).count("loved to play") == 2 and "Tell me a story" in words(whole)
    assert words(answers).count("loved to play") == 3 and "Tell me a" not in words(answers)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("none.jsonl", None, [], "none.jsonl"),
        ("none.txt", None, [], "none.txt"),
        ("a.jsonl", "no JSON", [], "no usable records"),
        ("a.txt", STORY, ["--from-answers"], "plain text, which has no answers"),
        ("a.txt", STORY, [], "no run of 6 tokens occurs 2 times"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, name: str, content: str | None, options: list[str], message: str
) -> None:
    file, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        file.write_text(content)
    command = ("datastore", "build", str(file), "--model", "paceline/tiny", "--out", str(out))
    result = paceline(*command, *options)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr
    assert not out.exists()
