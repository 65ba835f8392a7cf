"""What an answer repeats of its conversation is drafted: tool results, earlier turns, prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM
from paceline.core.batch import Commit
from paceline.request.grammar import Matcher
from support.asking import ask
from support.running_server import MODEL, Running, serve, service_of

RESULT = "Warehouse 7 holds 42 green kettles and 19 copper lamps."
CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": "{}"}}
QUESTION = {"role": "user", "content": "What is in stock?"}
TOLD = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": RESULT},
]


@pytest.fixture(scope="module", params=["ngram", "suffix"])
def server(target: LLM, request: pytest.FixtureRequest) -> Iterator[Running]:
    yield from serve(service_of(target.with_draft(request.param, draft_length=6)))


@pytest.fixture
def accepted(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafted tokens that a step accepted. Only lookups draft: the grammars below stand for a model
    that repeats something, and their forced text would be drafted without any."""
    monkeypatch.setattr(Matcher, "forced_tokens", lambda *_: ())
    engine, counts = server.service.client.engine.llm.engine, list[int]()
    account = engine.record_step

    def counted(commits: list[Commit], start: float) -> None:
        counts.extend(len(commit.path) for commit in commits)
        account(commits, start)

    monkeypatch.setattr(engine, "record_step", counted)
    return counts


def answer(server: Running, path: str, text: str, **fields: Any) -> Any:
    """An answer that can only be ``text``, or a JSON string of it."""
    schema = {"const": text}
    if path.endswith("responses"):
        format = {"type": "json_schema", "name": "x", "schema": schema}
        fields |= {"text": {"format": format}, "max_output_tokens": 200}
    else:
        fields |= {"structured_outputs": {"choice": [text]}, "max_tokens": 200}
    reply = ask(server.url, path, {"model": MODEL, "temperature": 0, **fields})
    assert reply.status == 200, reply.text
    return reply.json


@pytest.mark.parametrize("text", [RESULT, f"<think>{RESULT}</think>{RESULT}"])
def test_messages_sent_back(server: Running, accepted: list[int], text: str) -> None:
    """Tool results, earlier answers and the system's text, also where the model thinks."""
    earlier = [QUESTION, {"role": "assistant", "content": RESULT}, QUESTION]
    system = [{"role": "system", "content": RESULT}, QUESTION]
    for messages in (TOLD, earlier, system):
        accepted.clear()
        said = answer(server, "/v1/chat/completions", text, messages=messages)
        assert RESULT in said["choices"][0]["message"]["content"]
        assert sum(accepted) > 0.6 * said["usage"]["completion_tokens"]


def test_a_response_that_goes_on(server: Running, accepted: list[int]) -> None:
    """Of the response before come its input, here a tool result, and its output."""
    path = "/v1/responses"
    call = {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": RESULT}
    first = answer(server, path, "Yes", input=[QUESTION, call, output])
    accepted.clear()
    second = answer(server, path, RESULT, input="Again", previous_response_id=first["id"])
    assert json.loads(second["output"][0]["content"][0]["text"]) == RESULT
    assert sum(accepted) > 0.6 * second["usage"]["output_tokens"]


THINKS = """{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}
</think>{% endif %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant: """
WAYS = {  # of the client, and what the model thinks
    "left out": "Shelf 3 holds 58 blue jugs and 26 tin plates, so nothing else fits there today.",
    "as content": "Our van left the harbour at 6:40 with nine crates of limes and two spare tyres.",
    "as reasoning": "Both keys open gate B, but only the brass one turns the lock of room 215.",
    "as an item": "Add 17 to 88 first, then take away 41, which gives 64 apples for Tom and Mia.",
    "by the id": "If Friday is cloudy, they will paint 12 doors green and wash every window twice.",
}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def turns(way: str, thought: str, first: Any) -> dict[str, Any]:
    """The fields of the next request of a conversation whose ``first`` answer had a thought."""
    said = {"role": "assistant", "content": "Yes"}
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]}
    return {
        "left out": {"messages": [QUESTION, said, QUESTION]},
        "as content": {"messages": [QUESTION, said | {"content": f"{thought} Yes"}, QUESTION]},
        "as reasoning": {"messages": [QUESTION, said | {"reasoning_content": thought}, QUESTION]},
        "as an item": {"input": [QUESTION, item, said, QUESTION]},
        "by the id": {"input": "Again", "previous_response_id": first.get("id")},
    }[way]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_thought_before(
    server: Running, accepted: list[int], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It is drafted where the model thinks it again, whether the client sends thoughts back or not:
    then suffix decoding's memory of earlier answers has it."""
    monkeypatch.setattr(server.service.tokenizer, "chat_template", THINKS)
    path = RESPONSES if way in ("as an item", "by the id") else CHAT
    drafter = server.service.client.engine.llm.engine.drafter.name
    thought = WAYS[way]
    begins = {"input": [QUESTION]} if path == RESPONSES else {"messages": [QUESTION]}
    first = answer(server, path, f"<think>{thought}</think>Yes", **begins)
    new = sum(accepted)
    accepted.clear()
    answer(server, path, f"<think>{thought}</think>No", **turns(way, thought, first))
    tokens = len(accepted) + sum(accepted)
    assert new < 0.4 * tokens
    if way == "left out" and drafter == "ngram":
        assert sum(accepted) < 0.4 * tokens
    else:
        assert sum(accepted) > 0.6 * tokens
