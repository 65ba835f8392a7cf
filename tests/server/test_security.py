"""Keys, origins, sizes and limits in front of the API, and a log without content."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import openai
import pytest

from paceline import LLM
from paceline.errors import ConfigError
from paceline.server.security import (
    OPEN_PATHS,
    Keys,
    exposure_warning,
    is_loopback,
)
from support.running_server import MODEL, Running, serve, service_of

KEY, OTHER_KEY = "sk-first", "sk-second"
ORIGIN = "https://chat.example"
LIMIT = 2000
SECRET = "xylophone"


@pytest.fixture(scope="module")
def guarded(target: LLM) -> Iterator[Running]:
    """Two keys, one origin, small requests, and prompts in the log."""
    service = service_of(
        target.with_draft("ngram", draft_length=2),
        log_prompts=True,
        max_request_bytes=LIMIT,
        cors_origin=(ORIGIN,),
    )
    yield from serve(service, Keys.of([KEY, OTHER_KEY]))


def ask(
    server: Running,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[HTTPResponse, bytes]:
    """``body``: an object for JSON, or bytes, or an iterator of bytes to be sent in chunks."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    sent = json.dumps(body) if isinstance(body, (dict, list)) else body
    given = {"Content-Type": "application/json", **(headers or {})}
    connection.request(method, path, sent, given)
    response = connection.getresponse()
    return response, response.read()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def completion(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": SECRET, "max_tokens": 3, **fields}


# -- keys ------------------------------------------------------------------------------------------


def test_keys_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the team\n sk-a \n\nsk-b\nsk-a\n")
    keys = Keys.load(path, {"PACELINE_API_KEYS": "sk-c, sk-d\n"})
    assert len(keys) == 4
    assert all(keys.contains(key) for key in (b"sk-a", b"sk-b", b"sk-c", b"sk-d"))
    assert not any(
        keys.contains(key) for key in (b"", b"sk-", b"sk-a ", b"# for the team", b"\xff")
    )
    assert "sk-a" not in repr(keys)


def test_no_keys() -> None:
    assert not Keys.load(None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [("# none\n", "has no key"), ("two words\n", "printable ASCII"), ("schlüssel", "ASCII")],
)
def test_bad_key_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        Keys.load(path, {})
    assert str(path) in str(caught.value)


def test_promised_keys_that_are_not_there(tmp_path: Path) -> None:
    """An empty variable is a mistake, never a server without keys."""
    with pytest.raises(ConfigError, match="PACELINE_API_KEYS has no key"):
        Keys.load(None, {"PACELINE_API_KEYS": " "})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keys.load(tmp_path / "nowhere", {})
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not text"):
        Keys.load(tmp_path / "binary", {})


def test_what_is_reached_from_outside() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "server.example")))
    assert exposure_warning("127.0.0.1", Keys()) is None
    assert exposure_warning("0.0.0.0", Keys.of([KEY])) is None
    assert "no API keys are set" in (exposure_warning("0.0.0.0", Keys()) or "")


def test_a_response_is_kept_for_its_own_key(guarded: Running) -> None:
    def respond(key: str, **fields: object) -> tuple[HTTPResponse, bytes]:
        body = {"input": "Hi", "max_output_tokens": 3, **fields}
        return ask(guarded, "POST", "/v1/responses", body, bearer(key))

    first = json.loads(respond(KEY)[1])
    path = f"/v1/responses/{first['id']}"
    assert ask(guarded, "GET", path, headers=bearer(OTHER_KEY))[0].status == 404
    assert ask(guarded, "DELETE", path, headers=bearer(OTHER_KEY))[0].status == 404
    assert respond(OTHER_KEY, previous_response_id=first["id"], store=False)[0].status == 404
    assert ask(guarded, "GET", path, headers=bearer(KEY))[0].status == 200
    item = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    assert respond(OTHER_KEY, input=item)[0].status == 400
    assert respond(KEY, input=[*item, {"role": "user", "content": "Go on"}])[0].status == 200


def test_a_key_is_needed_and_any_will_do(guarded: Running) -> None:
    for key in (KEY, OTHER_KEY):
        assert ask(guarded, "GET", "/v1/models", headers=bearer(key))[0].status == 200
    answers = [
        ask(guarded, "GET", "/v1/models", headers=headers)
        for headers in (
            {},
            bearer("sk-third"),
            bearer(KEY + "x"),
            bearer(KEY[:-1]),
            bearer(""),
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
        )
    ]
    for response, body in answers:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
        assert KEY not in error["message"]


def test_what_is_open_without_a_key(guarded: Running) -> None:
    documented = json.loads(ask(guarded, "GET", "/openapi.json", headers=bearer(KEY))[1])["paths"]
    paths = {path for path in documented if "{" not in path} | {"/", "/openapi.json", "/nowhere"}
    paths |= {"/metrics", "/docs"}
    assert {"/v1/chat/completions", "/tokenize", "/health"} <= paths
    for path in paths:
        refused = ask(guarded, "GET", path)[0].status == 401
        assert refused == (path not in OPEN_PATHS), path
    assert ask(guarded, "GET", "/health/../metrics")[0].status == 401
    assert ask(guarded, "GET", "//metrics")[0].status == 401


def test_openai_client_with_keys(guarded: Running) -> None:
    options = {"base_url": f"{guarded.url}/v1", "max_retries": 0, "timeout": 30}
    assert openai.OpenAI(api_key=KEY, **options).models.list().data[0].id == MODEL
    with pytest.raises(openai.AuthenticationError, match="key is not valid"):
        openai.OpenAI(api_key="wrong", **options).models.list()


# -- sizes and limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LIMIT + 1, 4 * LIMIT, 100 * LIMIT])
@pytest.mark.parametrize("chunked", [False, True])
def test_large_requests(guarded: Running, size: int, chunked: bool) -> None:
    """With or without a Content-Length; what is sent beyond the limit is never collected."""
    if chunked and size > 8 * LIMIT:
        size = 7 * LIMIT  # beyond that the connection is closed while the client still sends
    body = json.dumps(completion(prompt="x" * size)).encode()
    sent: object = iter([body[i : i + 700] for i in range(0, len(body), 700)]) if chunked else body
    response, answer = ask(guarded, "POST", "/v1/completions", sent, bearer(KEY))
    assert response.status == 413
    assert json.loads(answer)["error"]["code"] == "request_too_large"
    assert response.headers["Connection"] == "close"


def test_a_request_of_just_the_size(guarded: Running) -> None:
    body = json.dumps(completion(prompt="a")).encode()
    body += b" " * (LIMIT - len(body))
    assert ask(guarded, "POST", "/v1/completions", body, bearer(KEY))[0].status == 200
    refused = ask(guarded, "POST", "/v1/completions", body + b" ", bearer(KEY))[0]
    assert refused.status == 413


def test_keys_come_before_sizes(guarded: Running) -> None:
    assert ask(guarded, "POST", "/v1/completions", b"x" * LIMIT * 2)[0].status == 401


# -- origins ---------------------------------------------------------------------------------------


def test_no_cors_unless_configured(server: Running) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    for method, headers in (("GET", {"Origin": ORIGIN}), ("OPTIONS", preflight)):
        response, _ = ask(server, method, "/v1/models", headers=headers)
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


def test_configured_origins_and_no_others(guarded: Running) -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for origin, welcome in ((ORIGIN, True), ("https://evil.example", False)):
        asked, _ = ask(
            guarded, "OPTIONS", "/v1/completions", headers={"Origin": origin, **preflight}
        )
        assert (asked.status == 200) == welcome
        # A refusal for want of a key can be read by the page that was refused.
        refused, _ = ask(guarded, "GET", "/v1/models", headers={"Origin": origin})
        assert refused.status == 401
        for response in (asked, refused):
            allowed = response.headers["Access-Control-Allow-Origin"]
            assert allowed == (ORIGIN if welcome else None)


def test_pages_elsewhere_cannot_post_without_a_preflight(server: Running) -> None:
    """A browser sends text/plain across origins unasked; such a request must not be decoded."""
    body = json.dumps(completion()).encode()
    response, _ = ask(server, "POST", "/v1/completions", body, {"Content-Type": "text/plain"})
    assert response.status in (400, 415, 422)


@pytest.fixture(scope="module")
def local(target: LLM) -> Iterator[Running]:
    yield from serve(service_of(target.with_draft()), local=True)


def test_local_servers_answer_to_local_names(local: Running) -> None:
    port = local.url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]"):
        assert ask(local, "GET", "/v1/models", headers={"Host": host})[0].status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "::1:x"):
        response, _ = ask(local, "GET", "/v1/models", headers={"Host": host})
        assert response.status == 400, host


# -- the log ---------------------------------------------------------------------------------------


def wait_for_lines(caplog: pytest.LogCaptureFixture, *patterns: str) -> None:
    """A line of ours for each; a request's is written when its answer is already out."""
    end = time.monotonic() + 10
    while True:
        lines = [r.getMessage() for r in caplog.records if r.name == "paceline.server"]
        missing = [p for p in patterns if not any(re.fullmatch(p, line) for line in lines)]
        if not missing:
            return
        assert time.monotonic() < end, (missing, lines)
        time.sleep(0.01)


def test_the_log_has_no_content(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert ask(server, "POST", "/v1/completions", completion())[0].status == 200
        chat = {
            "model": MODEL,
            "messages": [{"role": "user", "content": SECRET}],
            "max_tokens": 3,
            "stream": True,
        }
        assert ask(server, "POST", "/v1/chat/completions", chat)[0].status == 200
        assert ask(server, "POST", "/v1/completions", completion(n=SECRET))[0].status == 400
        ask(server, "GET", f"/v1/models?key={SECRET}", headers=bearer(SECRET))
        ask(server, "GET", "/a%0Ab%20c")
        wait_for_lines(
            caplog,
            r"POST /v1/completions 200 \d+\.\d{3} s 3 tokens",
            r"POST /v1/chat/completions 200 \d+\.\d{3} s \d tokens",
            r"POST /v1/completions 400 \d+\.\d{3} s",
            r"GET /v1/models 200 \d+\.\d{3} s",
            r"GET /a%0Ab%20c 404 \d+\.\d{3} s",
        )
    assert SECRET not in caplog.text


def test_who_leaves_before_the_answer_is_logged(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a body, and the connection is gone: no error of ours."""
    address = server.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.INFO):
        with socket.create_connection((address[0], int(address[1]))) as client:
            kind = "Content-Type: application/json\r\nContent-Length: 100"
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n"
            client.sendall(head.encode() + b'{"model"')
        wait_for_lines(caplog, r"POST /v1/completions 499 .* s")


def test_polls_do_not_fill_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for path in ("/metrics", "/health", "/health/ready", "/version"):
            ask(server, "GET", path)
        wait_for_lines(caplog, "GET /version 200 .*")
    assert "/metrics" not in caplog.text and "/health" not in caplog.text


def test_prompts_are_logged_when_asked(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask(guarded, "POST", "/v1/completions", completion(prompt="two\nlines"), bearer(KEY))
        wait_for_lines(caplog, r'prompt ".*two\\nlines"', "POST /v1/completions 200 .*")
    assert KEY not in caplog.text
