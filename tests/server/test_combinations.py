"""Requests with many fields at once, several at a time, streamed and whole: the answers are those
of the same requests without drafts, field for field; what is refused is refused alike.

COMBINATIONS=3000 SEED=2 python -m pytest -s tests/server/test_combinations.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline import LLM
from soak.answers import Answer
from soak.requests import CHATS, COMPLETIONS
from support.asking import Reply, ask
from support.running_server import MODEL, Running, serve, service_of

COUNT, SEED = int(os.environ.get("COMBINATIONS", "40")), os.environ.get("SEED", "1")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXTS = (
    "Once upon a time",
    "1 2 3 4 5 6 7 8",
    "the cat the cat the cat the",
    "Zürich 🙂 naïve",
    " ",
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("weather", CITY), ("clock", {"type": "object"}))
]
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}},
    {"enum": ["Zürich", "Köln"]},
    {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 4},
)
# Each with its values; several at once.
ANYWHERE: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0, 0.7, 1.0, 1.5),
    "top_p": (0, 0.5, 0.95),
    "top_k": (1, 3, 40, -1),
    "min_p": (0.01, 0.3),
    "presence_penalty": (-2, 0.5, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "repetition_penalty": (0.8, 1.1, 1.5),
    "stop": ("the", [".", "\n"], ["e t", "zz", "🙂"], ["a", "}", ","]),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (False,),
    "ignore_eos": (True,),
    "min_tokens": (1, 3, 9),
    "stop_token_ids": ([5, 300], [17]),
    "logit_bias": ({"17": 3.5, "300": -100}, {"40": 100, "41": 100}),
    "structured_outputs": (
        {"regex": "[a-z ]{3,30}"},
        {"choice": ["yes", "no", "yesterday"]},
        {"json": SCHEMAS[0]},
        {"grammar": 'start: "a" | "b" start'},
    ),
    "response_format": (
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in SCHEMAS),
    ),
    "priority": (-1, 4),
    "return_token_ids": (True,),
}
BY_PATH: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {
        "n": (2, 3),
        "echo": (True,),
        "logprobs": (0, 1, 4),
        "max_tokens": (1, 4, 40),
    },
    CHATS: {
        "n": (2, 3),
        "logprobs": (True,),
        "top_logprobs": (3,),
        "tools": (TOOLS,),
        "tool_choice": (
            "auto",
            "required",
            "none",
            {"type": "function", "function": {"name": "clock"}},
        ),
        "parallel_tool_calls": (False,),
        "prediction": ({"type": "content", "content": "the cat the cat"},),
        "continue_final_message": (True,),
    },
    RESPONSES: {
        "top_logprobs": (2,),
        "instructions": ("Be kind.",),
        "tools": ([{"type": "function", "name": "weather", "parameters": CITY}],),
        "tool_choice": ("required", "none"),
        "text": ({"format": {"type": "json_schema", "name": "x", "schema": SCHEMAS[0]}},),
    },
    MESSAGES: {
        "system": ("Be kind.",),
        "tools": ([{"name": "weather", "input_schema": CITY}],),
        "tool_choice": ({"type": "any"}, {"type": "none"}),
        "stop_sequences": (["e"],),
    },
}


@pytest.fixture(scope="module")
def drafting(target: LLM) -> Iterator[Running]:
    yield from serve(service_of(target.with_draft("auto", max_batch_size=6), max_queue=64))


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request with one right answer."""
    chooser = random.Random(f"{SEED}/{number}")
    path = chooser.choice((COMPLETIONS, COMPLETIONS, CHATS, CHATS, RESPONSES, MESSAGES))
    text, often = chooser.choice(TEXTS), chooser.choice((0.1, 0.25, 0.5))
    body: dict[str, Any] = {"model": MODEL, "seed": chooser.choice((0, 5, 2**63 - 1))}
    many = [{"role": "user", "content": text}, {"role": "assistant", "content": "It was"}]
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = chooser.choice((4, 24))
    if path == COMPLETIONS:
        body["prompt"] = chooser.choice((text, [text, TEXTS[0]], [5, 9, 301, 36]))
    elif path == RESPONSES:
        body |= {"input": text, "store": False}
    else:
        body["messages"] = many if chooser.random() < 0.2 else many[:1]
    for name, values in (ANYWHERE | BY_PATH[path]).items():
        if chooser.random() < often:
            body[name] = chooser.choice(values)
    if "tool_choice" in body and "tools" not in body:
        del body["tool_choice"]
    if "top_logprobs" in body and path == CHATS:
        body["logprobs"] = True
    return path, body


def answer_of(path: str, reply: Reply) -> Any:
    """What was said, whole or streamed, without names and times."""
    if reply.status != 200:
        return reply.status, reply.error["message"]
    chunks = reply.chunks or [reply.json]
    if path in (COMPLETIONS, CHATS):
        return Answer.of(chunks)
    if path == RESPONSES:
        last = chunks[-1].get("response", chunks[-1])
        return without_names([last["status"], last["output"], last["usage"]["output_tokens"]])
    if len(chunks) == 1:
        return [parts(block) for block in chunks[0]["content"]], chunks[0]["stop_reason"]
    blocks: list[dict[str, Any]] = []
    for chunk in chunks:
        if chunk["type"] == "content_block_start":
            blocks.append(dict(chunk["content_block"]))
        elif chunk["type"] == "content_block_delta":
            for name, value in chunk["delta"].items():
                blocks[-1][name] = value if name == "type" else blocks[-1].get(name, "") + value
    reasons = [c["delta"]["stop_reason"] for c in chunks if c["type"] == "message_delta"]
    return [parts(block) for block in blocks], reasons[-1]


def parts(block: dict[str, Any]) -> Any:
    """A content block's text, or the name of a tool whose input is compared where it is whole."""
    return block["text"] if block.get("text") is not None else block.get("name")


def without_names(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {
            key: round(value, 3) if isinstance(value, float) else without_names(value)
            for key, value in thing.items()
            if key not in ("id", "call_id", "logprob", "top_logprobs")
        }
    return [without_names(item) for item in thing] if isinstance(thing, list) else thing


def test_many_fields_at_once(drafting: Running) -> None:
    """Six at a time, so that drafts of some meet plain requests of others."""
    statuses: Counter[tuple[str, int]] = Counter()

    def difference(number: int) -> str | None:
        path, body = asked(number)
        chooser = random.Random(f"{SEED}/{number}/ways")
        alone = ask(drafting.url, path, body | {"speculation": {"drafter": "none"}})
        drafts = {"drafter": "auto"} | chooser.choice(({}, {"draft_length": 5}, {"stats": True}))
        streams = chooser.random() < 0.6
        reply = ask(drafting.url, path, body | {"speculation": drafts, "stream": streams})
        statuses[path, alone.status] += 1
        if max(reply.status, alone.status) >= 500:
            return f"{path} {body}: {reply.status} {alone.status} {reply.text[:300]}"
        left, right = answer_of(path, reply), answer_of(path, alone)
        if isinstance(left, Answer) and isinstance(right, Answer):
            found = left.difference(right)
        else:
            found = None if left == right else f"{left} against {right}"
        return found and f"number {number}, streams {streams}: {path} {body}: {found}"

    with ThreadPoolExecutor(6) as pool:
        found = [one for one in pool.map(difference, range(COUNT)) if one]
    print(f"{COUNT} requests: {dict(statuses)}")
    print(*found[:40], sep="\n")
    assert not found
    assert drafting.service.client.idle
