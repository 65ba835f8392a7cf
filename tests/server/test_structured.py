"""Structured output through the API, as the ``openai`` package asks for it."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from support.running_server import MODEL, Running


class Weather(BaseModel):
    city: str = Field(max_length=12)
    sky: Literal["clear", "cloudy"]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


MESSAGES: Any = [{"role": "user", "content": "The weather in Bonn?"}]
SCHEMA = Weather.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=80
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=80
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert isinstance(final.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("drafter", ["none", "model", "ngram"])
def test_speculation_changes_nothing(client: openai.OpenAI, drafter: str) -> None:
    texts = []
    for name in ("none", drafter):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format=FORMAT,
            temperature=1.0,
            seed=4,
            n=2,
            logprobs=True,
            max_tokens=80,
            extra_body={"speculation": {"drafter": name}},
        )
        texts.append([choice.message.content for choice in answer.choices])
    assert texts[0] == texts[1]
    for text in texts[0]:
        Weather.model_validate_json(text or "")


def test_completions_take_it_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="JSON: ",
        max_tokens=80,
        temperature=0,
        extra_body={"response_format": FORMAT},
    )
    Weather.model_validate_json(answer.choices[0].text)


def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=120,
    )
    choice = answer.choices[0]
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_cut_in_the_middle(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=FORMAT, temperature=0, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"


def test_what_cannot_be_done_is_said(client: openai.OpenAI) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type") as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=bad)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="json_schema goes with"):
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format={"type": "json_schema"}
        )
