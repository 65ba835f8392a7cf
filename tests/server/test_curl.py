"""The server as curl sees it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from support.running_server import MODEL, Running

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(server: Running, path: str, body: Any = None, *options: str) -> tuple[int, str]:
    """(status, text)."""
    command = ["curl", "-sS", "-N", "-m", "60", "-w", "\n%{http_code}", *options]
    if body is not None:
        text = body if isinstance(body, str) else json.dumps(body)
        command += ["-H", "Content-Type: application/json", "-d", text]
    done = subprocess.run([*command, f"{server.url}{path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


REQUEST = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def test_completion_and_stream(server: Running) -> None:
    status, text = curl(server, "/v1/completions", REQUEST)
    assert status == 200
    whole = json.loads(text)["choices"][0]["text"]
    status, text = curl(server, "/v1/completions", {**REQUEST, "stream": True}, "-i")
    assert status == 200 and "content-type: text/event-stream" in text
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-1]) == whole


def test_chat(server: Running) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    status, text = curl(server, "/v1/chat/completions", body)
    answer = json.loads(text)
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_small_endpoints(server: Running) -> None:
    assert json.loads(curl(server, "/v1/models")[1])["data"][0]["id"] == MODEL
    assert json.loads(curl(server, "/version")[1])["version"]
    assert curl(server, "/health") == (200, '{"status":"ok"}')
    status, text = curl(
        server,
        "/tokenize",
        {"prompt": "Hello world", "add_special_tokens": False, "return_token_strs": True},
    )
    reply = json.loads(text)
    assert status == 200 and reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    status, text = curl(server, "/detokenize", {"tokens": reply["tokens"]})
    assert status == 200 and json.loads(text)["prompt"] == "Hello world"
    status, text = curl(server, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert status == 200 and json.loads(text)["count"] > 2


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", "{", 400, "the body is not valid JSON"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        ("/v1/completions", "[1]", 400, "the body: Input should be a valid dictionary"),
        ("/v1/completions", "", 400, "the body: Field required"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "'user' needs content"),
        ("/v1/completions", {**REQUEST, "prompt": {}}, 400, "prompt: give a text, a list of"),
        ("/v1/completions", {**REQUEST, "beams": 3}, 400, "unknown or unsupported field 'beams'"),
        ("/v1/completions", {**REQUEST, "model": "gpt"}, 404, "does not exist"),
        ("/v1/completions", {**REQUEST, "prompt": []}, 400, "at least 1 item"),
        ("/v1/completions", {**REQUEST, "n": 1000}, 400, "n: Input should be less"),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "messages"),
        ("/v1/nothing", {}, 404, "Not Found; GET /docs lists all endpoints"),
        ("/detokenize", {"tokens": [-1]}, 400, "not in the vocabulary"),
        ("/tokenize", {}, 400, "either prompt or messages"),
    ],
)
def test_errors(server: Running, path: str, body: Any, status: int, message: str) -> None:
    answered, text = curl(server, path, body)
    error = json.loads(text)["error"]
    assert answered == status
    assert message in error["message"] and "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_wrong_method(server: Running) -> None:
    status, text = curl(server, "/v1/completions")
    assert status == 405 and json.loads(text)["error"]["code"] == "method_not_allowed"
