"""The ``openai`` package: chats, responses, tools, structured output, streams."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from support.served_process import Served

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


class Place(BaseModel):
    city: str
    large: bool


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120)


def test_chats(served: Served, client: openai.OpenAI) -> None:
    options = {
        "model": served.model,
        "messages": [{"role": "user", "content": "Name a city."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**options, store=True, metadata={"a": "b"})
    stream = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content and text
    again = [*options["messages"], whole.choices[0].message.model_dump(), *options["messages"]]
    assert client.chat.completions.create(**{**options, "messages": again}).choices
    parsed = client.chat.completions.parse(**{**options, "max_tokens": 80}, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_responses(served: Served, client: openai.OpenAI) -> None:
    options = {"model": served.model, "input": "Name a city.", "temperature": 0}
    first = client.responses.create(**options, max_output_tokens=24)
    assert first.output_text and first.usage.output_tokens <= 24
    assert client.responses.create(
        **options, max_output_tokens=8, previous_response_id=first.id
    ).output_text
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER}
    forced = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 80}
    with client.responses.stream(**options, **forced) as stream:
        final = [event for event in stream][-1].response
    assert set(json.loads(final.output[0].arguments)) == {"city"}
    parsed = client.responses.parse(**options, text_format=Place, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, Place)


def test_predicted_outputs(served: Served, client: openai.OpenAI) -> None:
    options = {
        "model": served.model,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": 40,
        "temperature": 0,
    }
    plain = client.chat.completions.create(**options)
    text = plain.choices[0].message.content
    told = client.chat.completions.create(
        **options, prediction={"type": "content", "content": text}
    )
    assert told.choices[0].message.content == text
    details = told.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > details.rejected_prediction_tokens
