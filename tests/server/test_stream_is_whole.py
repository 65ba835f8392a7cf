"""The same request streamed and whole: one content, list of calls, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from support.asking import ask
from support.running_server import MODEL, Running

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}


def choices(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(ask(server.url, f"/v1/{path}", {"model": MODEL, **body}).json["choices"])


def streamed(server: Running, path: str, body: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The choices of all chunks, by index."""
    choices: dict[int, list[dict[str, Any]]] = {}
    asked = {"model": MODEL, **body, "stream": True}
    for chunk in ask(server.url, f"/v1/{path}", asked).chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


def merged(records: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Dictionaries of lists, put together."""
    kept = [record for record in records if record]
    if not kept:
        return None
    return {
        key: [item for record in kept for item in record[key]] if kept[0][key] is not None else None
        for key in kept[0]
    }


def calls_of(deltas: list[dict[str, Any]]) -> list[list[str]]:
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
        if call["index"] == len(calls):
            calls.append([call["function"]["name"], ""])
        calls[call["index"]][1] += call["function"]["arguments"]
    return calls


def same_tokens(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Other drafts are other shapes of batches, so probabilities may differ in the last digits."""
    assert [(one["token"], one["bytes"]) for one in left] == [
        (one["token"], one["bytes"]) for one in right
    ]
    figures = [one["logprob"] for one in right]
    assert [one["logprob"] for one in left] == pytest.approx(figures, abs=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 2.0},
        {"temperature": 2.0, "stop": ["e", "\n"]},
        {"temperature": 2.0, "tools": [TOOL]},
        {"tools": [STRICT], "tool_choice": "required"},
        {"tools": [STRICT], "tool_choice": "required", "max_tokens": 14},
        {"tools": [STRICT], "tool_choice": "required", "max_tokens": 5},
        {"tools": [STRICT], "tool_choice": "required", "stop": ["}"]},
    ],
)
def test_chats(server: Running, more: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "max_tokens": 60,
        "seed": 3,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "speculation": {"tokens": True},
        **more,
    }
    chunks = streamed(server, "chat/completions", body)
    for choice in choices(server, "chat/completions", body):
        parts = chunks[choice["index"]]
        deltas = [part["delta"] for part in parts]
        message = choice["message"]
        assert "".join(d.get("content") or "" for d in deltas) == (message["content"] or "")
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert calls_of(deltas) == [[f["name"], f["arguments"]] for f in functions]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [
            choice["finish_reason"]
        ]
        logprobs = merged([part["logprobs"] for part in parts])
        assert logprobs is not None
        same_tokens(logprobs["content"], choice["logprobs"]["content"])
        tokens = [token for part in parts for token in part.get("tokens", [])]
        assert [(t["id"], t["text"]) for t in tokens] == [
            (t["id"], t["text"]) for t in choice["tokens"]
        ]
        assert "tool_choice" not in more or functions or choice["finish_reason"] != "tool_calls"


def test_completions(server: Running) -> None:
    body = {
        "prompt": ["Once upon a time", "The sun"],
        "n": 2,
        "seed": 5,
        "temperature": 2.0,
        "max_tokens": 50,
        "logprobs": 3,
        "speculation": {"tokens": True},
    }
    chunks = streamed(server, "completions", body)
    for choice in choices(server, "completions", body):
        parts = chunks[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        logprobs = merged([part["logprobs"] for part in parts])
        assert logprobs is not None
        for name in ("tokens", "text_offset"):
            assert logprobs[name] == choice["logprobs"][name]
        figures = choice["logprobs"]["token_logprobs"]
        assert logprobs["token_logprobs"] == pytest.approx(figures, abs=1e-3)
        tokens = [token for part in parts for token in part.get("tokens", [])]
        assert "".join(token["text"] for token in tokens) == choice["text"]
        assert [token["text"] for token in tokens] == [t["text"] for t in choice["tokens"]]
        offsets = choice["logprobs"]["text_offset"]
        lengths = [len(token["text"]) for token in tokens]
        assert offsets == [sum(lengths[:position]) for position in range(len(lengths))]


def test_responses(server: Running) -> None:
    """Of text that is held back, as it may begin a stop string, the probabilities come with it."""
    body = {
        "model": MODEL,
        "input": "Once upon a time",
        "max_output_tokens": 60,
        "seed": 5,
        "include": ["message.output_text.logprobs"],
    }
    (whole,) = ask(server.url, "/v1/responses", body).json["output"][0]["content"]
    held = [f"{word} and no more" for word in whole["text"].split()]
    asked = {**body, "stop": held[:16], "stream": True}
    events = ask(server.url, "/v1/responses", asked).chunks
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == whole["text"]
    same_tokens([one for delta in deltas for one in delta["logprobs"]], whole["logprobs"])
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    same_tokens(done["logprobs"], whole["logprobs"])
