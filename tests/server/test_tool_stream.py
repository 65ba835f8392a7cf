"""A streamed answer with tools is the whole answer, wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.api.protocol import Tool
from paceline.server.api.tools import (
    ForcedCallParser,
    TextParser,
    ToolCallParser,
    message_from_deltas,
)

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name}})
    for name in ("add", "find")
]
CALL = '{"name": "add", "arguments": {"a": 1}}'
OTHER = '{"name": "find", "arguments": {}}'
UNKNOWN = '{"name": "delete", "arguments": {}}'


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


class Client:
    """Puts the chunks of a stream together as the ``openai`` package does."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []

    def read(self, deltas: Sequence[dict[str, Any]]) -> None:
        for delta in deltas:
            assert delta.get("content") or delta.get("tool_calls"), "an empty delta"
            self.content += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(self.calls):
                    self.ids.append(call["id"])
                    self.calls.append([call["function"]["name"], ""])
                self.calls[call["index"]][1] += call["function"]["arguments"]


def told(make: Callable[[], TextParser], parts: Sequence[str], reason: str) -> tuple[Any, ...]:
    stream, client = make(), Client()
    for part in parts:
        client.read(stream.feed(part))
    rest, reason = stream.finish(reason)
    client.read(rest)
    assert len(set(client.ids)) == len(client.ids)
    return client.content, client.calls, reason


def whole(make: Callable[[], TextParser], text: str, reason: str) -> tuple[Any, ...]:
    stream = make()
    deltas = stream.feed(text)
    rest, reason = stream.finish(reason)
    message = message_from_deltas([*deltas, *rest])
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [[function["name"], function["arguments"]] for function in functions]
    return message["content"] or "", calls, reason


def cuts(data: st.DataObject, text: str) -> list[str]:
    cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=12))
    ends = sorted({0, len(text), *cuts})
    return [text[a:b] for a, b in pairwise(ends)]


BITS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```", "```json", "\n```"),
    *(
        "```tool_code\n",
        "```python\n",
        "`",
        "<",
        "[",
        "[{",
        "{",
        "}",
        "]",
        '"',
        "\\",
        "<tool_",
        "[TO",
    ),
    *(CALL, OTHER, UNKNOWN, f"[{CALL}, {OTHER}]", f"[{CALL}, {UNKNOWN}]", CALL[:-4], "{}", "[]"),
    *(" ", "\n", "Four", "é🙂", " and ", ", ", "js", "json", " " * 300),
    json.dumps({"name": "add", "arguments": {"code": "```\n</tool_call>\\"}}),
]
ANSWERS = st.lists(st.sampled_from(BITS), max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    text=ANSWERS, parallel=st.booleans(), reason=st.sampled_from(["stop", "length"]), data=st.data()
)
def test_any_cut_of_any_answer_says_the_same(
    text: str, parallel: bool, reason: str, data: st.DataObject
) -> None:
    def make() -> TextParser:
        return ToolCallParser(TOOLS, parallel)

    expected = whole(make, text, reason)
    assert told(make, cuts(data, text), reason) == expected
    assert told(make, pieces(text, 1), reason) == expected
    content, calls, ended = expected
    if not calls:
        assert content == text and ended == reason
    assert parallel or len(calls) <= 1


CALLS = {
    f"<tool_call>\n{CALL}\n</tool_call>": ["add"],
    f"<tool_call>{OTHER}</tool_call>": ["find"],
    f"[TOOL_CALLS] [{CALL}, {OTHER}]": ["add", "find"],
}
TEXTS = [
    *(
        "Let me see.",
        " I add",
        "\n\n",
        "a < b",
        "5 [a]",
        "é🙂",
        "```py\nx = {}\n```",
        f"as in {CALL}",
    ),
    *(f"<tool_call>{UNKNOWN}</tool_call>", f"```json\n{UNKNOWN}\n```", "<tool_call>no</tool_call>"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*CALLS, *TEXTS]), max_size=6))
def test_calls_are_found_and_the_rest_is_text(parts: list[str]) -> None:
    content, calls, reason = whole(lambda: ToolCallParser(TOOLS, True), "".join(parts), "stop")
    names = [name for part in parts for name in CALLS.get(part, [])]
    assert [name for name, _ in calls] == names
    text = "".join(part for part in parts if part not in CALLS)
    assert content.split() == text.split() or "".join(content.split()) == "".join(text.split())
    assert reason == ("tool_calls" if names else "stop")


@pytest.mark.parametrize(
    "text",
    [
        "Four, I think. I am sure of it.",
        "```python\nfor i in range(10):\n    print(i)\n```",
        "Use < or > and [TOOLS] here, it will do",
    ],
)
def test_text_does_not_wait_for_the_end(text: str) -> None:
    stream = ToolCallParser(TOOLS, parallel=True)
    shown = ""
    for position, character in enumerate(text, 1):
        shown += "".join(delta["content"] for delta in stream.feed(character))
        assert len(shown) >= position - len("<|python_tag|>")
        assert text.startswith(shown)


def test_only_one_call_where_parallel_ones_are_not_wanted() -> None:
    text = f"[TOOL_CALLS][{CALL}, {OTHER}]"
    for parts in (pieces(text, 1), [text]):
        content, calls, reason = told(lambda: ToolCallParser(TOOLS, False), parts, "stop")
        assert (content, [name for name, _ in calls], reason) == ("", ["add"], "tool_calls")


def test_a_second_call_that_is_cut_off_is_told_by_the_reason() -> None:
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER[:-4]}"
    content, calls, reason = told(lambda: ToolCallParser(TOOLS, True), pieces(text, 3), "length")
    assert [name for name, _ in calls] == ["add"] and reason == "length"
    assert content == f"<tool_call>{OTHER[:-4]}"


ARGUMENTS = st.recursive(
    st.one_of(st.integers(0, 99), st.text(max_size=4), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=4), ARGUMENTS, max_size=3),
    reason=st.sampled_from(["stop", "length"]),
    data=st.data(),
)
def test_any_cut_of_a_forced_call_says_the_same(
    arguments: Any, reason: str, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()))
    text = '{"name": "add", "arguments": ' + written + "}"
    end = data.draw(st.one_of(st.just(len(text)), st.integers(0, len(text))))
    expected = whole(ForcedCallParser, text[:end], reason)
    assert told(ForcedCallParser, cuts(data, text[:end]), reason) == expected
    content, calls, ended = expected
    assert content == ""
    if end == len(text):
        assert (calls, ended) == ([["add", written]], "tool_calls")
    elif calls:
        assert calls[0][0] == "add" and written.startswith(calls[0][1]) and ended == reason
    else:
        assert end < text.index(written) and ended == reason


def test_a_forced_call_streams_its_arguments() -> None:
    stream = ForcedCallParser()
    deltas = [delta for piece in pieces(CALL, 1) for delta in stream.feed(piece)]
    calls = [call for delta in deltas for call in delta["tool_calls"]]
    assert calls[0]["function"] == {"name": "add", "arguments": ""} and calls[0]["id"]
    assert [call["function"]["arguments"] for call in calls[1:]] == list('{"a": 1}')
    assert stream.finish("stop") == ([], "tool_calls")
