"""What SmolLM2 repeats of a tool's result is drafted from it, whatever the API and client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM
from paceline.core.batch import Commit
from support.asking import ask
from support.running_server import Running, serve, service_of

NAME = "smollm2"
RESULT = json.dumps(
    {
        "order": "PX-88213-KQ",
        "customer": "Ottoline Varga-Trench",
        "address": "14 Quillfeather Mews, Bristlewick BW7 3QT",
        "items": [{"sku": "LMP-0091", "name": "brass reading lamp", "price": 48.15}],
    }
)
ASK = {"role": "user", "content": "What do we know of order PX-88213-KQ? Copy the result."}
ARGUMENTS = json.dumps({"id": "PX-88213-KQ"})
CALL = {"id": "c1", "type": "function", "function": {"name": "order", "arguments": ARGUMENTS}}
CHAT = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
BLOCK = {"type": "tool_use", "id": "c1", "name": "order", "input": json.loads(ARGUMENTS)}
GIVEN: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [*CHAT, {"role": "tool", "tool_call_id": "c1", "content": RESULT}],
    "/v1/responses": [
        ASK,
        {"type": "function_call", "call_id": "c1", "name": "order", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
    ],
    "/v1/messages": [
        ASK,
        {"role": "assistant", "content": [BLOCK]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}],
        },
    ],
}


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[Running]:
    llm = plain.with_draft("suffix:global=off", draft_length=8, kv_cache_memory=100 << 20)
    yield from serve(service_of(llm, NAME))
    llm.close()


@pytest.mark.parametrize("path", GIVEN)
def test_a_tool_result(server: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.service.client.engine.llm.engine
    counts, account = [0, 0], engine.record_step

    def counted(commits: list[Commit], start: float) -> None:
        for commit in commits:
            counts[0] += len(commit.tokens)
            counts[1] += len(commit.path)
        account(commits, start)

    monkeypatch.setattr(engine, "record_step", counted)
    body = {"model": NAME, "temperature": 0}
    given = "input" if path == "/v1/responses" else "messages"
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    reply = ask(server.url, path, {**body, given: GIVEN[path], most: 80})
    assert reply.status == 200, reply.text
    assert "Quillfeather" in reply.text
    written, drafted = counts
    assert drafted > 0.5 * written
    if path == "/v1/responses":
        counts[:] = 0, 0
        more = {given: "Say the result again.", "previous_response_id": reply.json["id"]}
        assert ask(server.url, path, {**body, **more, most: 80}).status == 200
        written, drafted = counts
        assert drafted > 0.5 * written
