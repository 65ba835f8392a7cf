"""SmolLM2 behind the server, and the measuring commands on it in their quick form."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app
from paceline.settings.tuned import TunedSettings
from support.running_server import Running, serve, service_of

NAME = "smollm2"
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[Running]:
    llm = plain.with_draft(
        "ngram:min=1", draft_length=4, kv_cache_memory=100 << 20, max_batch_size=2
    )
    yield from serve(service_of(llm, NAME, max_queue=8))


def post(server: Running, **body: Any) -> bytes:
    data = json.dumps({"model": NAME, "messages": [QUESTION], **body}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


def test_a_forced_tool_call(server: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = json.loads(post(server, tools=[WEATHER], tool_choice=choice, max_tokens=60))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "unit"} and arguments["city"].strip()


def test_a_schema_and_a_stream_of_it(server: Running) -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    params: dict[str, Any] = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": schema, "strict": True},
        },
        "max_tokens": 60,
        "temperature": 0,
    }
    whole = json.loads(post(server, **params))["choices"][0]["message"]["content"]
    assert set(json.loads(whole)) == {"city", "unit"}
    lines = post(server, stream=True, **params).decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert len(pieces) > 3 and "".join(pieces) == whole


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "short.txt"
    file.write_text("one two three one two three one two\n---\ndef add(a, b):\n", encoding="utf-8")
    return str(file)


def record(command: str, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON; in the dtype that users get, and with a small cache."""
    result = CliRunner().invoke(app, [command, *arguments, "--kv-cache-memory", "100M", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_bench(model: str, prompts: str) -> None:
    found = record(
        *("bench", "--model", model, "--draft", "ngram:min=1", "-m", "draft@3"),
        *("--prompts", prompts, "--rounds", "1", "--max-tokens", "8"),
    )
    rows = {row["method"]: row for row in found["figures"]}
    assert rows["plain"]["tokens"] == rows["draft@3"]["tokens"] >= 2 * 8
    assert rows["draft@3"]["tokens_per_second"]["median"] > 0


def test_certify(model: str, prompts: str) -> None:
    found = record(
        *("certify", "--model", model, "--draft", "ngram:min=1", "--draft-length", "2"),
        *("--prompts", prompts, "--num-prompts", "2", "--max-tokens", "8"),
        *("--prefixes", "1", "--samples", "200", "--seconds", "3600"),
    )
    assert found["lossless"] is True and found["problems"] == []
    assert 0 < found["smallest_bias"] < 1


def test_tune(model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.tune.plan.MIN_BATCH_SIZE", 2)
    out = str(tmp_path / "p.toml")
    found = record(
        *("tune", "--model", model, "--draft", "ngram:min=1", "--draft-only", "--out", out),
        *("--prompts", prompts, "--max-tokens", "6", "--rounds", "1"),
    )
    assert "ngram" in {entry["spec"] for entry in found["confirmation"]}  # min=1 is the default
    assert TunedSettings.read(out).model.name == model


def test_doctor(model: str) -> None:
    found = record("doctor", "--model", model, "--draft", "ngram:min=1")
    codes = {item["code"] for item in found["findings"] if item["about"] == "target"}
    assert {"architecture-supported", "weights-complete"} <= codes
    assert not codes & {"chat-template-refuses", "turn-end-ignored"}


def test_profile(model: str, prompts: str) -> None:
    found = record(
        *("profile", "--model", model, "--draft", "ngram:min=1", "--draft-length", "2"),
        *("--prompts", prompts, "--steps", "5", "--rounds", "1"),
    )
    assert len(found["runs"]) == 2 and found["runs"][0]["name"] == "plain"
