"""What a model thinks is separated from what it answers, in all chat APIs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from paceline.server.api.protocol import Tool
from paceline.server.api.reasoning import HarmonyParser, Marks
from paceline.server.api.tools import TextParser, ToolCallParser, message_from_deltas
from support.asking import ask
from support.running_server import MODEL, Running

THINK = Marks("<think>", "</think>", False)
TOOL = Tool.model_validate({"type": "function", "function": {"name": "add"}})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>They ask.\n<b><|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Wait. <|end|><|start|>assistant<|channel|>final<|message|>Two"
)
HARMONY_CALLS = (
    "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1}<|end|>'
    '<|start|>assistant to=functions.sub-1<|channel|>commentary json<|message|>{"b": "<|"}'
)
HARMONY_CODE = (  # a call of a tool that the request does not offer
    "<|channel|>analysis<|message|>Run.<|end|><|start|>assistant to=python<|channel|>analysis "
    "code<|message|>print(2)<|end|><|start|>assistant<|channel|>final<|message|>2"
)
CASES: list[tuple[str, bool, dict[str, Any], str]] = [
    ("<think>\nIt is 2.\n</think>\n\nTwo", False, {"content": "Two", "thought": "It is 2."}, ""),
    (" \n<think>a < b</think>c", False, {"content": "c", "thought": "a < b"}, ""),
    ("so</thin g</think> c", True, {"content": "c", "thought": "so</thin g"}, ""),
    ("<think>never ends </thi", False, {"content": "", "thought": "never ends </thi"}, ""),
    ("no <think>x</think>", False, {"content": "no <think>x</think>"}, ""),
    ("<thin", False, {"content": "<thin"}, ""),
    ("<think></think>\n\nc", False, {"content": "c"}, ""),
    (f"<think>add</think>\n{CALL}", False, {"content": None, "thought": "add", "calls": 1}, ""),
    (HARMONY, False, {"content": "Wait. Two", "thought": "They ask.\n<b>"}, "harmony"),
    (HARMONY_CALLS, False, {"content": None, "thought": "Add.", "calls": 2}, "harmony"),
    (' to=functions.add<|channel|>x<|message|>{"a": 1}', False, {"content": None, "calls": 1}, "h"),
    ("plain {", False, {"content": "plain {"}, "harmony"),
    (HARMONY_CODE, False, {"content": "2", "thought": "Run.print(2)"}, "harmony"),
]


def parser_of(kind: str, inside: bool) -> TextParser:
    if kind:
        return HarmonyParser({"add", "sub-1"})
    prompt = "user: x <think>\n" if inside else "x"
    return THINK.parser(ToolCallParser([TOOL], True), prompt, {"add"})


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(1, 9), min_size=40))
def test_every_way_to_cut_an_answer_gives_the_same_message(
    case: tuple[str, bool, dict[str, Any], str], cuts: list[int]
) -> None:
    text, inside, wanted, kind = case
    parser, deltas, rest = parser_of(kind, inside), [], text
    for cut in cuts:
        deltas += parser.feed(rest[:cut])
        rest = rest[cut:]
    deltas += parser.feed(rest)
    last, reason = parser.finish("stop")
    message = message_from_deltas([*deltas, *last])
    assert message["content"] == wanted["content"]
    assert message.get("reasoning_content") == wanted.get("thought")
    calls = message.get("tool_calls", [])
    assert len(calls) == wanted.get("calls", 0)
    assert reason == ("tool_calls" if calls else "stop")
    if calls:
        assert calls[0]["function"]["name"] == "add"
        assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
    if len(calls) == 2:
        assert calls[1]["function"] == {"name": "sub-1", "arguments": '{"b": "<|"}'}


def test_marks_are_known_by_the_template_and_special_tokens() -> None:
    plain, special = (
        AddedToken(mark, special=mark == "<|end|>") for mark in ("</think>", "<|end|>")
    )
    for template, pair, is_special in [
        ("<|channel|>analysis<|message|><|end|>", ("<|channel|>", "<|end|>"), True),
        ("<think>\n\n</think>", ("<think>", "</think>"), False),
    ]:
        tokenizer = SimpleNamespace(
            chat_template=template, added_tokens_decoder={7: plain, 8: special}
        )
        assert Marks.of(cast(Any, tokenizer)) == Marks(*pair, is_special)
    assert Marks.of(cast(Any, SimpleNamespace(chat_template="[THINK]"))) is None


TEMPLATE = (
    "{% if enable_thinking is false %}Do not think.{% endif %}{% for m in messages %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
QUESTION = {"role": "user", "content": "What is 1 + 1?"}
ANSWER = "<think>\nOne and one.\n</think>\n\nTwo"
THOUGHT = "One and one."


@pytest.fixture
def thinking(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(server.service.tokenizer, "chat_template", TEMPLATE)
    return server


def request(path: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer can only be ANSWER."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = {"input" if path == RESPONSES else "messages": [QUESTION]}
    return {
        "model": MODEL,
        "structured_outputs": {"choice": [ANSWER]},
        limit: 80,
        **asked,
        **fields,
    }


def answer(server: Running, path: str, **fields: Any) -> Any:
    reply = ask(server.url, path, request(path, **fields))
    assert reply.status == 200, reply.text
    return reply.json


def test_a_chat_completion(thinking: Running) -> None:
    whole = answer(thinking, CHAT)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Two")
    usage = whole["usage"]
    thought_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought_tokens < usage["completion_tokens"]  # the answer's are not among them
    reply = ask(thinking.url, CHAT, request(CHAT, stream=True))
    deltas = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for line in reply.text.splitlines()
        if line.startswith("data: {")
    ]
    assert message_from_deltas(deltas) == {"content": "Two", "reasoning_content": THOUGHT}


def test_thoughts_are_left_out_or_left_in(thinking: Running) -> None:
    message = answer(thinking, CHAT, include_reasoning=False)["choices"][0]["message"]
    assert message["content"] == "Two" and "reasoning_content" not in message
    message = answer(thinking, CHAT, separate_reasoning=False)["choices"][0]["message"]
    assert message["content"] == ANSWER and "reasoning_content" not in message


def test_a_model_without_marks_is_left_alone(server: Running) -> None:
    whole = answer(server, CHAT)
    assert whole["choices"][0]["message"]["content"] == ANSWER
    assert "completion_tokens_details" not in whole["usage"]


def events(server: Running, path: str, **fields: Any) -> list[Any]:
    reply = ask(server.url, path, request(path, stream=True, **fields))
    return [json.loads(s[6:]) for s in reply.text.splitlines() if s.startswith("data: {")]


def test_a_response(thinking: Running) -> None:
    whole = answer(thinking, RESPONSES)
    thought, message = whole["output"]
    assert thought["type"] == "reasoning" and thought["id"].startswith("rs_")
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == "Two"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    sent = events(thinking, RESPONSES)
    pieces = [e["delta"] for e in sent if e["type"] == "response.reasoning_text.delta"]
    assert "".join(pieces) == THOUGHT
    done = next(e for e in sent if e["type"] == "response.reasoning_text.done")
    assert (done["text"], done["output_index"], done["content_index"]) == (THOUGHT, 0, 0)
    final = sent[-1]["response"]["output"]
    assert [item["type"] for item in final] == ["reasoning", "message"]
    # The next turn continues from both items.
    answer(thinking, RESPONSES, input="Again", previous_response_id=whole["id"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_after_its_thought(thinking: Running, stream: bool) -> None:
    """The thought is complete; the text has the log-probabilities of its own tokens."""
    tokens = answer(thinking, RESPONSES)["usage"]["output_tokens"]
    fields = {"max_output_tokens": tokens - 1, "include": ["message.output_text.logprobs"]}
    if stream:
        response = events(thinking, RESPONSES, **fields)[-1]["response"]
    else:
        response = answer(thinking, RESPONSES, **fields)
    thought, message = response["output"]
    assert [thought["status"], message["status"]] == ["completed", "incomplete"]
    (part,) = message["content"]
    assert part["text"] and "".join(p["token"] for p in part["logprobs"]) == part["text"]


def test_a_message(thinking: Running) -> None:
    blocks = answer(thinking, MESSAGES, thinking={"type": "adaptive"})["content"]
    assert blocks[0] == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert blocks[1] == {"type": "text", "text": "Two"}
    (only,) = answer(thinking, MESSAGES)["content"]  # clients that do not ask read the first block
    assert only == {"type": "text", "text": "Two"}
    sent = events(thinking, MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
    deltas = [e["delta"] for e in sent if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == THOUGHT
    starts = [e["content_block"]["type"] for e in sent if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    counts = [
        ask(
            thinking.url,
            f"{MESSAGES}/count_tokens",
            {"messages": [QUESTION], "thinking": {"type": kind}},
        ).json["input_tokens"]
        for kind in ("disabled", "adaptive")
    ]
    assert counts[0] > counts[1]
    turn = {"role": "assistant", "content": blocks}
    answer(thinking, MESSAGES, messages=[QUESTION, turn, QUESTION])


def test_the_openai_package_reads_thoughts(thinking: Running) -> None:
    client = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0)
    extra = {"structured_outputs": {"choice": [ANSWER]}}
    with client.responses.stream(model=MODEL, input="1 + 1?", extra_body=extra) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == "Two"
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "1 + 1?"}], extra_body=extra
    )
    message = chat.choices[0].message
    assert message.content == "Two" and message.model_extra == {"reasoning_content": THOUGHT}
    assert chat.usage is not None and chat.usage.completion_tokens_details is not None
    assert (chat.usage.completion_tokens_details.reasoning_tokens or 0) > 0
