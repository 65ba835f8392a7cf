"""The prompts of the benchmarks: files, shipped ones, and the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

import real
from paceline.lab.bench.prompts import evenly
from prompts import ALL_SUITES, SHIPPED, load_suites, read_suites
from support.real_prompts import write_prompts


class Bytes:
    """Stands for an LLM: a token per byte, chats with U: and A:."""

    chat_template = "there is one"

    @property
    def tokenizer(self) -> Any:
        return self

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return list(f"U:{messages[0]['content']}A:".encode())


LLM: Any = Bytes()


def write(folder: Path, *records: dict[str, Any]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "arith.jsonl").write_text("".join(lines))


def test_prompts(tmp_path: Path) -> None:
    assert set(SHIPPED) == set(ALL_SUITES)
    assert all(prompt.chat for prompt in read_suites(tmp_path, ["arith"])["arith"])
    write(tmp_path, {"id": "x", "format": "completion", "turns": ["first", "second"]})
    (prompt,) = read_suites(tmp_path, ["arith"])["arith"]
    assert (prompt.chat, prompt.text) == (False, "first")
    assert evenly(list(range(10)), 3) == [0, 3, 6]
    assert evenly(list(range(3)), None) == evenly(list(range(3)), 9) == [0, 1, 2]


def test_chats_go_through_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ("What is 345 + 278?", "What is 345 + 278 + 4567?")
    write(tmp_path, *({"format": "chat", "turns": [text]} for text in texts))
    suites = load_suites(tmp_path, ["arith"], LLM, 25)
    assert bytes(suites["arith"][0]) == b"U:What is 345 + 278?A:"
    assert len(suites["arith"]) == 1  # the other is longer
    assert "arith: 1 of 2 prompts are too long" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="all prompts of arith have more than 3 tokens"):
        load_suites(tmp_path, ["arith"], LLM, 3)
    write(tmp_path, {"format": "completion", "turns": ["hi"]})
    assert bytes(load_suites(tmp_path, ["arith"], LLM, 9)["arith"][0]) == b"hi"
    assert bytes(load_suites(tmp_path, ["arith"], LLM, 9, chat=True)["arith"][0]) == b"U:hiA:"


def test_no_prompt_is_used_twice(tmp_path: Path) -> None:
    folder = str(write_prompts(tmp_path))
    suites = read_suites(folder, real.SETS)
    assert set(suites) == set(real.SETS)
    everything = [prompt.text for prompts in suites.values() for prompt in prompts]
    assert len(everything) == len(set(everything)) == 4 * len(real.SETS)
    assert len(read_suites(folder, ["math_reasoning"])["math_reasoning"]) == 5
    with pytest.raises(SystemExit, match="no shipped prompts for 'alpaca'"):
        read_suites(folder, ["alpaca"])
