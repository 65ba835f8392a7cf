"""Prompts: the shipped set, and files in the layouts of the field."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.errors import DataError, PromptError
from paceline.lab.bench.prompts import BenchPrompt, fit, load_prompts

CATEGORIES = {
    "arithmetic",
    "chat",
    "code",
    "code_editing",
    "creative_writing",
    "rag",
    "summarisation",
    "translation",
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("paceline/tiny", draft="none", max_batch_size=1)


def write(folder: Path, *records: Any, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def only(folder: Path, record: dict[str, Any]) -> BenchPrompt:
    (prompt,) = load_prompts(write(folder, record))
    return prompt


# -- the shipped set -----------------------------------------------------------------------------


def test_the_shipped_set_has_eight_categories_of_eight() -> None:
    counts = Counter(prompt.category for prompt in load_prompts())
    assert counts == dict.fromkeys(CATEGORIES, 8)


def test_shipped_prompts_are_all_different_and_fit_the_embedded_model(llm: LLM) -> None:
    prompts = load_prompts()
    assert len({prompt.text for prompt in prompts}) == len({p.name for p in prompts}) == 64
    for prompt in prompts:
        assert 5 <= len(prompt.encode(llm)) < 400, prompt.name
    # Long enough to be worth the name: half of them have at least 35 words.
    assert sorted(len(prompt.text.split()) for prompt in prompts)[32] >= 35


# -- layouts -------------------------------------------------------------------------------------


def test_spec_bench(tmp_path: Path) -> None:
    record = {
        "question_id": 241,
        "category": "summarization",
        "turns": ["Summarize: A pig walks.", "Shorter."],
    }
    prompt = only(tmp_path, record)
    assert prompt.name == "prompts/241"
    assert prompt.category == "summarization"  # kept as it is
    assert prompt.chat
    assert prompt.text == "Summarize: A pig walks."


def test_mt_bench_with_references_and_lists_called_prompt(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"question_id": 101, "category": "reasoning", "turns": ["A?", "B?"], "reference": ["x"]},
        {"question_id": 102, "category": "reasoning", "prompt": ["C?", "D?"]},
        {"question_id": "q9", "turns": [{"content": "E?"}]},
    )
    first, second, third = load_prompts(file)
    assert (first.text, second.text, third.text) == ("A?", "C?", "E?")
    assert second.chat
    assert (third.name, third.category) == ("q9", "chat")


def test_humaneval(tmp_path: Path) -> None:
    record = {
        "task_id": "HumanEval/2",
        "prompt": "def truncate(number):\n",
        "entry_point": "truncate",
        "canonical_solution": "    return number % 1.0\n",
        "test": "def check(candidate): ...",
    }
    prompt = only(tmp_path, record)
    assert (prompt.name, prompt.category, prompt.chat) == ("HumanEval/2", "code", False)
    assert prompt.text == "def truncate(number):\n"


def test_mbpp(tmp_path: Path) -> None:
    record = {"task_id": 11, "text": "Write a function.", "code": "def f(): ...", "test_list": []}
    prompt = only(tmp_path, record)
    assert (prompt.name, prompt.category, prompt.chat) == ("prompts/11", "code", True)


def test_gsm8k(tmp_path: Path) -> None:
    prompt = only(tmp_path, {"question": "How many ducks?", "answer": "2 + 1\n#### 3"})
    assert (prompt.name, prompt.category) == ("prompts/0", "arithmetic")
    assert prompt.chat and prompt.text == "How many ducks?"


def test_our_own_layout(tmp_path: Path) -> None:
    record = {"id": "a/1", "category": "story", "format": "completion", "turns": ["Once"]}
    assert only(tmp_path, record) == BenchPrompt("a/1", "story", "Once", False)


def test_messages_stop_at_the_last_user_turn(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
    ]
    prompt = only(tmp_path, {"messages": said})
    assert (prompt.text, prompt.category, prompt.chat) == ("Who are you?", "chat", True)
    assert prompt.earlier == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."))


def test_plain_fields_are_completions_unless_they_say_chat(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "One"}, {"text": "Two"}, {"prompt": "3", "format": "chat"})
    assert [prompt.chat for prompt in load_prompts(file)] == [False, False, True]
    assert {prompt.category for prompt in load_prompts(file)} == {"text"}


def test_layouts_may_be_mixed(tmp_path: Path) -> None:
    file = write(tmp_path, {"question": "Q", "answer": "1"}, "", {"prompt": "P"}, {"turns": ["T"]})
    assert [prompt.text for prompt in load_prompts(file)] == ["Q", "P", "T"]


# -- files ---------------------------------------------------------------------------------------


def test_a_text_file_is_one_prompt(tmp_path: Path) -> None:
    file = write(tmp_path, "A first paragraph.", "", "A second.", name="letter.txt")
    (prompt,) = load_prompts(file)
    assert prompt == BenchPrompt("letter/0", "text", "A first paragraph.\n\nA second.", False)


def test_dashes_separate_the_prompts_of_a_text_file(tmp_path: Path) -> None:
    file = write(tmp_path, "---", "One", "two", "---", "", "---", "  Three - - -", name="p.md")
    assert [prompt.text for prompt in load_prompts(file)] == ["One\ntwo", "  Three - - -"]


def test_byte_order_mark_and_line_separators_inside_strings(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert [prompt.text for prompt in load_prompts(file)] == ["a\u2028b", "c"]


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    file = write(tmp_path, {"prompt": "a"}, f'{{"prompt": {deep}}}')
    with pytest.raises(DataError, match="line 2: not JSON"):
        load_prompts(file)


# -- choosing ------------------------------------------------------------------------------------


def test_categories_and_counts_are_chosen_evenly(tmp_path: Path) -> None:
    records = [{"id": f"{c}{i}", "category": c, "turns": ["T"]} for i in range(6) for c in "ba"]
    file = write(tmp_path, *records)
    names = [prompt.name for prompt in load_prompts(file, per_category=3)]
    assert names == ["b0", "b2", "b4", "a0", "a2", "a4"]
    assert {p.category for p in load_prompts(file, ["a"])} == {"a"}
    assert len(load_prompts(file, per_category=99)) == 12


def test_prompts_that_do_not_fit_are_listed(llm: LLM) -> None:
    long = BenchPrompt("long", "text", "word " * 2000, False)
    short = BenchPrompt("short", "text", "Once upon a time", False)
    fitting, left_out = fit([long, short], llm, 100)
    assert [(prompt, ids) for prompt, ids in fitting] == [(short, short.encode(llm))]
    assert left_out == ["long"]
    size = len(short.encode(llm))
    remaining = llm.target.max_positions - size
    assert not fit([short], llm, remaining)[1]
    room = rf"room for {remaining + 1} new tokens in .*: the shortest prompt has {size}; give "
    with pytest.raises(DataError, match=f"{room}shorter prompts or a smaller --max-tokens$"):
        fit([short], llm, remaining + 1)
    with pytest.raises(DataError, match=f"{room}shorter prompts$"):
        fit([short], llm, remaining + 1, "shorter prompts")


def test_chats_are_rendered_with_earlier_messages(llm: LLM) -> None:
    prompt = BenchPrompt(
        "c", "chat", "Why?", True, earlier=(("user", "Hi"), ("assistant", "Hello"))
    )
    said = [*prompt.earlier, ("user", "Why?")]
    expected = llm.render_chat([{"role": role, "content": text} for role, text in said])
    assert prompt.encode(llm) == expected
    assert BenchPrompt("t", "text", "Why?", False).encode(llm) == llm.tokenizer("Why?")["input_ids"]


def test_a_template_that_refuses_says_so(llm: LLM) -> None:
    prompt = BenchPrompt("c", "chat", "Why?", True, earlier=(("wizard", "Hi"),))
    with pytest.raises(PromptError, match="unknown role wizard"):
        fit([prompt], llm, 1)


# -- bad input: one clear line -------------------------------------------------------------------


def refused(source: Path, *categories: str) -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(source, categories)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{source.parent}/", "")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    assert (
        refused(missing) == "none.jsonl cannot be read: No such file or directory; check the path"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refused(folder) == "folder cannot be read: Is a directory; check the path"
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    assert refused(latin) == "latin.txt is not UTF-8 text (byte 3); save it as UTF-8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt", "not JSON (Expecting property name enclosed in double quotes); "),
        ("[1]", "not a JSON object; each record is one, with a prompt"),
        ('{"query": "Q"}', "none of the fields turns, messages, question, prompt, text; "),
        ('{"turns": []}', "turns must be a text or a list of texts"),
        ('{"prompt": 3}', "prompt must be a text or a list of texts"),
        ('{"prompt": " "}', "the prompt is empty; give it text or remove the record"),
        ('{"turns": ["T"], "category": 3}', "the category is 3; it must be a name"),
        ('{"turns": ["T"], "format": "x"}', "the format is 'x'; use chat or completion"),
        ('{"messages": [{"role": "user"}]}', "every message needs a role and a content of text"),
        ('{"messages": ["Hi"]}', "every message needs a role and a content of text"),
        ('{"messages": []}', "the conversation has no message of a user to answer"),
        (
            '{"messages": [{"role": "assistant", "content": "Hi"}]}',
            "the conversation has no message of a user to answer",
        ),
    ],
)
def test_bad_records_name_their_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, {"prompt": "good"}, line)
    assert refused(file).startswith(f"prompts.jsonl, line 2: {message}")


def test_no_prompts(tmp_path: Path) -> None:
    for name in ("empty.jsonl", "empty.txt"):
        assert refused(write(tmp_path, "", name=name)) == f"{name} has no prompts; add at least one"


def test_unknown_categories_name_the_known_ones(tmp_path: Path) -> None:
    file = write(tmp_path, {"turns": ["T"], "category": "a"}, {"turns": ["T"], "category": "b"})
    assert refused(file, "a", "x") == "no category x in prompts.jsonl; there are: a, b"
    with pytest.raises(DataError, match="no category x in the shipped prompt set; there are: arit"):
        load_prompts(None, ["x"])
