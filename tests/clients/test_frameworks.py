"""litellm and langchain-openai, with what they do beside a plain chat."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from support.served_process import Served

HELLO = [{"role": "user", "content": "Name a city."}]


class Place(BaseModel):
    """A place."""

    city: str


def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {
        "model": f"openai/{served.model}",
        "api_base": served.url,
        "api_key": "none",
        "messages": HELLO,
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = litellm.completion(**options)
    stream = litellm.completion(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content and text
    again = [*HELLO, whole.choices[0].message.model_dump(), *HELLO]
    assert litellm.completion(**{**options, "messages": again}).choices
    options.pop("messages"), options.pop("max_tokens")
    assert litellm.responses(**options, input="Name a city.", max_output_tokens=16).output
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "word " * 50_000}]
        litellm.completion(**options, messages=long)


def test_litellm_bridges_to_messages(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model=f"anthropic/{served.model}",
        api_base=served.root,
        api_key="none",
        messages=HELLO,
        max_tokens=16,
    )
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(served: Served, responses: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=served.url,
        api_key="none",
        model=served.model,
        temperature=0,
        max_tokens=64,
        use_responses_api=responses,
    )
    answer = model.invoke("Name a city.")
    assert answer.text and answer.usage_metadata["output_tokens"] <= 64
    streamed = [chunk.text for chunk in model.stream("Name a city.")]
    assert "".join(streamed) == answer.text and len(streamed) > 2
    assert model.invoke([("user", "Hello"), answer, ("user", "And another?")]).text
    assert isinstance(model.with_structured_output(Place).invoke("Name a city."), Place)
    forced = model.bind_tools([Place], tool_choice="Place").invoke("Name a city.")
    assert forced.tool_calls[0]["name"] == "Place" and "city" in forced.tool_calls[0]["args"]
