"""Bytes that are no request, or half of one. The server may refuse or hang up, never fail."""

from __future__ import annotations

import asyncio
import json
import random

from soak.client import Connection, request_bytes
from soak.requests import CHATS, COMPLETIONS

_PATIENCE = 20.0  # seconds that an answer may take


def body(chooser: random.Random, model: str) -> bytes:
    """What is sent as JSON and is none, or too much of it."""
    named = json.dumps(model)
    return chooser.choice(
        (
            b"",
            b"{",
            b"null",
            b"[]",
            b'"text"',
            b"\xff\xfe\x00",
            b'{"model": "\xc3\x28", "prompt": "x"}',
            b'{"model": ' + named.encode() + b', "prompt": "\x80\x81"}',
            b"[" * 100_000,
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            f'{{"model": {named}, "prompt": "x", "max_tokens": {"9" * 5000}}}'.encode(),
            f'{{"model": {named}, "prompt": "x", "temperature": NaN}}'.encode(),
            f'{{"model": {named}, "prompt": "x", "temperature": 1e999}}'.encode(),
            f'{{"model": {named}, "prompt": "x", "prompt": 7}}'.encode(),
            f'{{"model": {named}, "prompt": "{"x" * 5_000_000}"}}'.encode(),
            bytes(chooser.randrange(256) for _ in range(200)),
        )
    )


def nonsense(chooser: random.Random) -> bytes:
    """What is no HTTP."""
    return chooser.choice(
        (
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST /v1/completions HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n{}",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /\x00\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
            bytes(chooser.randrange(256) for _ in range(300)),
        )
    )


async def bad_body(port: int, chooser: random.Random, model: str) -> int:
    """The status that answers a body that is no request."""
    path = chooser.choice((COMPLETIONS, CHATS, "/tokenize", "/detokenize"))
    async with Connection(port) as connection:
        await connection.send(request_bytes("POST", path, body(chooser, model)))
        return await asyncio.wait_for(connection.status(), _PATIENCE)


async def bad_length(port: int, chooser: random.Random, model: str) -> int:
    """A body that is shorter or longer than declared, given up after a while; 0 without answer."""
    content = json.dumps({"model": model, "prompt": "x", "max_tokens": 2}).encode()
    length = chooser.choice((0, 5, len(content) - 1, len(content) + 9, 10**9, 10**30))
    async with Connection(port) as connection:
        await connection.send(request_bytes("POST", COMPLETIONS, content, length))
        if chooser.random() < 0.5:
            connection.half_close()
        try:
            return await asyncio.wait_for(connection.status(), 0.5 + chooser.random())
        except asyncio.TimeoutError:
            return 0


async def no_http(port: int, chooser: random.Random, model: str) -> int:
    async with Connection(port) as connection:
        await connection.send(nonsense(chooser))
        try:
            return await asyncio.wait_for(connection.status(), 1.0)
        except (asyncio.TimeoutError, ValueError, IndexError):
            return 0


async def half_a_request(port: int, chooser: random.Random, model: str) -> int:
    """Sent a few bytes at a time, and given up before its end."""
    whole = request_bytes("POST", CHATS, b'{"model": "x"}' * 50)
    async with Connection(port) as connection:
        for start in range(0, chooser.randrange(len(whole)), 40):
            await connection.send(whole[start : start + 40])
            await asyncio.sleep(0.01)
        return 0


ACTS = (bad_body, bad_body, bad_body, bad_length, no_http, half_a_request)
