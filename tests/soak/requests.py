"""Requests, drawn by a seed: what a client may ask for, what is too much, and what is wrong."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

_TEXTS = (
    "Once upon a time",
    "The little dog ran to",
    "def add(a, b):\n    return",
    "What is 12 + 30?",
    "A very long day began when the old king went into the garden. " * 8,
    "Zürich, Köln, naïve café: 日本語 🙂 ",
    " ",
    "\n\n\t",
    "a",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "\u0000\u0001\u202e",
)
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}},
    {"enum": ["Zürich", "Köln"]},
    {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "🙂"}]},
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks things up.",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}},
        },
    }
    for name in ("weather", "clock")
]

_CHAT_OPTIONS: tuple[dict[str, Any], ...] = (
    {"prediction": {"type": "content", "content": _TEXTS[4]}},
    {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
)
_COMPLETION_OPTIONS: tuple[dict[str, Any], ...] = (
    {"echo": True},
    {"echo": True, "max_tokens": 1, "logprobs": 1},
)


@dataclass(frozen=True)
class Server:
    """What is known of the server: its model, its drafters, some token ids, its context."""

    model: str
    drafters: tuple[str, ...]
    ids: tuple[int, ...]
    context: int


@dataclass(frozen=True)
class ClientRequest:
    """A request whose answer is determined: greedy or seeded."""

    key: int
    path: str
    body: dict[str, Any]

    def alone(self) -> dict[str, Any]:
        """The same without drafts and chunks."""
        return {**self.body, "stream": False, "speculation": {"drafter": "none"}}

    def variant(self, chooser: random.Random, drafters: tuple[str, ...]) -> dict[str, Any]:
        """Another way to ask for the same answer."""
        body = {**self.body, "speculation": speculation(chooser, drafters)}
        if chooser.random() < 0.6:
            body["stream"] = True
            if chooser.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        return body


def speculation(chooser: random.Random, drafters: tuple[str, ...]) -> dict[str, Any]:
    request: dict[str, Any] = {"drafter": chooser.choice(("auto", "none", *drafters, *drafters))}
    if chooser.random() < 0.5:
        request["draft_length"] = chooser.choice((0, 1, 2, 4, 7, 16, 64))
    for name in ("stats", "tokens"):
        if chooser.random() < 0.15:
            request[name] = True
    return request


def client_requests(seed: str, count: int, server: Server) -> list[ClientRequest]:
    """Requests with one right answer each."""
    found = []
    for key in range(count):
        chooser = random.Random(f"{seed}/request/{key}")
        path, body = base(chooser, server)
        if chooser.random() < 0.5:
            body["temperature"] = 0
        else:
            body["temperature"] = chooser.choice((0.2, 0.7, 1.0, 1.3, 2.0))
            body["seed"] = chooser.choice((0, 1, 2**31, 2**63 - 1, chooser.randrange(10**6)))
        found.append(ClientRequest(key, path, body))
    return found


def base(chooser: random.Random, server: Server) -> tuple[str, dict[str, Any]]:
    """Path and body of something valid."""
    body: dict[str, Any] = {"model": server.model, "max_tokens": chooser.choice((1, 4, 16, 40))}
    chat = chooser.random() < 0.4
    if chat:
        body["messages"] = messages(chooser)
        if chooser.random() < 0.3:
            body["tools"] = _TOOLS
            body["tool_choice"] = chooser.choice(("auto", "required", "none"))
            body["max_tokens"] = 40
    else:
        body["prompt"] = prompt(chooser, server)
    sampling(chooser, server, body)
    if chooser.random() < 0.12:
        body |= chooser.choice(_CHAT_OPTIONS if chat else _COMPLETION_OPTIONS)
    if body["max_tokens"] == 0:
        body.pop("min_tokens", None)
    if body.get("tool_choice") == "required":
        body.pop("min_tokens", None)  # a grammar says where its text ends
    if chooser.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    if chooser.random() < 0.12 and "tools" not in body and "min_tokens" not in body:
        body["response_format"] = response_format(chooser)
        body["max_tokens"] = 40
    return CHATS if chat else COMPLETIONS, body


def messages(chooser: random.Random) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    if chooser.random() < 0.3:
        told.append({"role": "system", "content": "Be kind."})
    for _ in range(chooser.choice((0, 0, 1, 2))):
        told.append({"role": "user", "content": chooser.choice(_TEXTS)})
        told.append({"role": "assistant", "content": "Yes."})
    text = chooser.choice(_TEXTS)
    content = text if chooser.random() < 0.8 else [{"type": "text", "text": text}]
    return [*told, {"role": "user", "content": content}]


def prompt(chooser: random.Random, server: Server) -> Any:
    kind = chooser.random()
    if kind < 0.15:  # any token after any other: texts that no text encodes to
        return [chooser.choice(server.ids) for _ in range(chooser.choice((1, 2, 17, 90)))]
    if kind < 0.25:
        return [chooser.choice(_TEXTS) for _ in range(chooser.choice((2, 3)))]
    return chooser.choice(_TEXTS)


def sampling(chooser: random.Random, server: Server, body: dict[str, Any]) -> None:
    """Any of the parameters, each now and then, at usual and at extreme values."""
    options: dict[str, tuple[Any, ...]] = {
        "top_p": (0, 0.01, 0.5, 0.95, 1e-9),
        "top_k": (1, 2, 40, 10**6, -1),
        "min_p": (0.01, 0.3, 1.0),
        "presence_penalty": (-2, -0.5, 0.5, 2),
        "frequency_penalty": (-2, 0.5, 2),
        "repetition_penalty": (0.8, 1.1, 1.5),
        "n": (2, 3),
        "stop": ("the", [".", "\n"], ["e t", "zz", "🙂"], "é", ""),
        "include_stop_str_in_output": (True,),
        "skip_special_tokens": (False,),
        "ignore_eos": (True,),
        "min_tokens": (1, 3),
    }
    for name, values in options.items():
        if chooser.random() < 0.12:
            body[name] = chooser.choice(values)
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    if chooser.random() < 0.12:
        ids = chooser.sample(server.ids, 4)
        body["logit_bias"] = {str(token): chooser.choice((-100, -3, 2.5, 100)) for token in ids}
    if chooser.random() < 0.1:
        body["stop_token_ids"] = chooser.sample(server.ids, 3)
    if chooser.random() < 0.1:  # as good as left out
        body |= {"stream_options": None, "user": "somebody", "store": False, "unheard_of": None}


def response_format(chooser: random.Random) -> dict[str, Any]:
    if chooser.random() < 0.3:
        return {"type": "json_object"}
    schema = {"name": "x", "schema": chooser.choice(_SCHEMAS)}
    return {"type": "json_schema", "json_schema": schema}


def free(chooser: random.Random, server: Server) -> tuple[str, dict[str, Any]]:
    """Valid, unseeded: its text is nobody's to predict."""
    path, body = base(chooser, server)
    body["temperature"] = chooser.choice((0.5, 1.0, 2.0))
    body["speculation"] = speculation(chooser, server.drafters)
    body["stream"] = chooser.random() < 0.5
    return path, body


def extreme(chooser: random.Random, server: Server) -> tuple[str, dict[str, Any]]:
    """At the edge of what floating point takes; an answer or a refusal, but no failure."""
    path, body = free(chooser, server)
    some = str(chooser.choice(server.ids))
    body |= chooser.choice(
        (
            {"temperature": 1, "repetition_penalty": 1e-40},
            {"temperature": 1e-30, "repetition_penalty": 1e-8, "logit_bias": {some: 100}},
            {"temperature": 1e-45},
            {"temperature": 5e-324, "logit_bias": {some: 100}},
            {"temperature": 2, "repetition_penalty": 10, "logit_bias": {some: -100}},
            {"top_p": 1e-45, "min_p": 1.0},
            {"temperature": 1, "logit_bias": {str(token): -100 for token in server.ids}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMAS[1]}}},
            {"max_tokens": server.context - 1, "deadline": 1.5},
            {"n": 16},
            {"stop": ["x" * 4000, "y" * 4000], "deadline": 5},
            {"ignore_eos": True, "stop_token_ids": list(server.ids[:64])},
        )
    )
    if "response_format" in body:
        body["temperature"] = 1
        # What may end or bend a text before its grammar does.
        for name in ("min_tokens", "tools", "tool_choice", "stop", "stop_token_ids", "logit_bias"):
            body.pop(name, None)
    return path, body


def invalid(chooser: random.Random, server: Server) -> tuple[str, bytes, set[int]]:
    """Path, body and the statuses that may answer it."""
    path, body = base(chooser, server)
    body = copy.deepcopy(body)
    text: Any = "messages" if path == CHATS else "prompt"
    change, statuses = chooser.choice(mistakes(text, server))
    body |= change
    if "response_format" in change:
        body.pop("tool_choice", None)  # beside a forced call there is no text to give a form
    return path, json.dumps(body).encode("utf-8"), statuses


def mistakes(text: str, server: Server) -> tuple[tuple[dict[str, Any], set[int]], ...]:
    """What is wrong in a body whose prompt is the field ``text``, and how it may be answered."""
    huge = "9" * 5000
    return (
        ({"model": "nobody/nothing"}, {404}),
        ({"temperature": -1}, {400}),
        ({"temperature": "hot"}, {400}),
        ({"temperature": float("nan")}, {400}),
        ({"top_p": -0.1}, {400}),
        ({"max_tokens": -1}, {400}),
        ({"n": 17}, {400}),
        ({"seed": 2**63}, {400}),
        ({"stop": [""]}, {400}),
        ({"stop": ["x"] * 17}, {400}),
        ({"stop": "\ud800"}, {400}),
        ({"stop": [5]}, {400}),
        ({"logit_bias": {huge: 1}}, {400}),
        ({"logit_bias": {"٣": 1}}, {200, 400}),
        ({"logit_bias": {"-1": 1}}, {400}),
        ({"logit_bias": {"5": 1e308}}, {400}),
        ({"logit_bias": {"5": float("inf")}}, {400}),
        ({"logit_bias": {str(10**9): 1}}, {400}),
        ({"unknown": 1}, {400}),
        ({"speculation": {"drafter": "magic"}}, {400}),
        ({"speculation": {"draft_length": 65}}, {400}),
        ({"deadline": 0}, {400}),
        ({"deadline": -1.0}, {400}),
        ({"min_tokens": 99, "max_tokens": 3}, {400}),
        ({"stop_token_ids": [10**30]}, {400}),
        ({"response_format": schema({"type": "strange"})}, {400}),
        ({"response_format": schema({"pattern": "(" * 500})}, {200, 400}),
        ({"response_format": schema(deep(300))}, {200, 400}),
        ({"tools": [{"type": "function"}]}, {400}),
        ({text: []}, {400}),
        ({text: "\udfff half a character"}, {400}),
        ({text: None}, {400}),
        ({text: too_long(text, server)}, {400}),
    )


def schema(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


def too_long(field: str, server: Server) -> Any:
    text = "word " * (2 * server.context)
    return [{"role": "user", "content": text}] if field == "messages" else text
