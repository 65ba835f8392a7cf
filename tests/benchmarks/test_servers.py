"""Servers compared over HTTP; the figures come from running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from paceline import LLM
from support.running_server import serve, service_of

servers = pytest.importorskip("servers")


def test_servers_take_turns_and_their_texts_are_compared(start: Callable[..., Any]) -> None:
    plain = LLM("paceline/tiny", draft="none", dtype="float32")
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(contextlib.contextmanager(serve)(service_of(llm))).url
            for llm in (plain, plain.with_draft("suffix"))
        ]
        options = ["--num-prompts", "2", "--max-tokens", "8", "--rounds", "1"]
        code, out, record = start(servers, *urls, "--concurrency", "1,2", *options)
    assert code == 0 and "tokens/s" in out
    cells = [(cell["url"], cell["concurrency"]) for cell in record["servers"]]
    assert cells == [(url, count) for count in (1, 2) for url in urls]
    assert all(cell["same"] == 2 and cell["tokens_per_second"] > 0 for cell in record["servers"])


def test_every_round_has_other_prompts_and_every_server_the_same(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, set[tuple[str, ...]]] = {}

    async def measure(url: str, prompts: list[str], *_: int) -> dict[str, Any]:
        asked.setdefault(url, set()).add(tuple(prompts))
        return {"texts": prompts, "tokens_per_second": 1.0, "first": 1.0}

    monkeypatch.setattr(servers, "measure", measure)
    _, _, record = start(servers, "a", "b", "--concurrency", "1,8", "--rounds", "3")
    assert asked["a"] == asked["b"] and len({p for turn in asked["a"] for p in turn}) == 64
    assert all(cell["same"] == 8 for cell in record["servers"])


def test_a_server_that_does_not_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["servers.py", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit, match=r"error: http://127.0.0.1:9: .*start the server first"):
        servers.main()
