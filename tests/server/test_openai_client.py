"""The ``openai`` package against our server."""

from __future__ import annotations

import json

import openai
import pytest

from support.running_server import MODEL, Running

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_completion_is_what_generate_says(client: openai.OpenAI, server: Running, target) -> None:
    from paceline import SamplingParams

    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0)
    expected = target.generate(PROMPT, SamplingParams(max_tokens=30))[0]
    choice = answer.choices[0]
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(target.tokenizer.encode(PROMPT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(expected.token_ids)


@pytest.mark.parametrize("seed", [None, 7])
def test_stream_is_the_whole(client: openai.OpenAI, seed: int | None) -> None:
    temperature = 0.0 if seed is None else 0.9
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    whole = client.completions.create(**options)
    parts = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part.choices[0].text for part in parts if part.choices)
    assert text == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert len(parts) > 3


def test_chat(client: openai.OpenAI) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 12 + 30?"}]},
    ]
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(**options, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_n_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        n=3,
        seed=1,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
    assert answer.usage is not None and answer.usage.completion_tokens <= 15


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "sunny": {"type": "boolean"}},
        "required": ["city", "sunny"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "The weather in Bonn?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
        temperature=0,
        max_tokens=60,
    )
    weather = json.loads(answer.choices[0].message.content or "")
    assert set(weather) == {"city", "sunny"} and isinstance(weather["sunny"], bool)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_call(client: openai.OpenAI, choice: object, stream: bool) -> None:
    options = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "The weather in Bonn?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 60,
    }
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        answer = client.chat.completions.create(**options).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        calls = answer.message.tool_calls or []
    assert calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert set(json.loads(arguments)) == {"city"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"best": 1}}, "unknown or unsupported field 'best'"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"best_of": 2}, "best_of: not supported; sample n answers"),
        ({"logit_bias": {"x": 1}}, "logit_bias: Input should be a valid integer"),
        ({"logit_bias": {"99999999": 1}}, "not in the vocabulary"),
        ({"extra_body": {"speculation": {"drafter": "magic"}}}, "not loaded"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [5, 10**7]}, "outside the vocabulary"),
        ({"prompt": 5}, "give a text"),
        ({"prompt": "word " * 5000}, "shorten the prompt"),
    ],
)
def test_errors(client: openai.OpenAI, fields: dict[str, object], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})
    body = caught.value.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}


def test_speculation_by_request(client: openai.OpenAI) -> None:
    texts = set()
    for named, drafted in (
        ({"drafter": "none"}, False),
        ({"drafter": "model"}, True),
        ({"drafter": "ngram"}, True),
        ({"drafter": "auto"}, True),
    ):
        params = {**named, "stats": True, "tokens": True}
        answer = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=60,
            temperature=0,
            extra_body={"speculation": params},
        ).to_dict()
        stats = answer["speculation"][0]
        tokens = answer["choices"][0]["tokens"]
        assert (stats["drafted_tokens"] > 0) == drafted or named == {"drafter": "ngram"}
        assert sum(token["from_draft"] for token in tokens) == stats["accepted_tokens"]
        names = {"model", "ngram"} if named == {"drafter": "auto"} else {named["drafter"]}
        assert {token["drafter"] for token in tokens if token["from_draft"]} <= names
        assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1
