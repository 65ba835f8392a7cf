"""HTTP by hand, so that a client can be as slow, rude and wrong as clients are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

HOST = "127.0.0.1"
PATIENCE = 120.0  # seconds for an answer; then a server must show that it works (storm.py)


class Connection:
    """One request, one answer. Use it as a context manager; leaving hangs up."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._chunked, self._length = False, -1

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port, limit=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def ask(self, method: str, path: str, body: bytes | None) -> None:
        await self.send(request_bytes(method, path, body))

    def half_close(self) -> None:
        """Nothing more will be sent, but the answer is still awaited."""
        self._writer.write_eof()

    async def status(self) -> int:
        """Reads the head of the answer; 0 if the server hung up without one."""
        line = await self._reader.readline()
        if not line:
            return 0
        status = int(line.split()[1])
        while (header := await self._reader.readline()).strip():
            name, _, value = header.decode("latin-1").lower().partition(":")
            if name == "transfer-encoding":
                self._chunked = "chunked" in value
            elif name == "content-length":
                self._length = int(value)
        return status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises EOFError if it ends early."""
        if self._chunked:
            while size := int((await self._reader.readline()) or b"-1", 16):
                if size < 0:
                    raise EOFError("the answer was cut off")
                yield await self._reader.readexactly(size)
                await self._reader.readline()
        elif self._length >= 0:
            yield await self._reader.readexactly(self._length)
        else:
            while piece := await self._reader.read(65536):
                yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self, pause: float = 0.0) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, ``pause`` seconds before each, until [DONE] or an error.

        Raises EOFError for a stream that ends without either.
        """
        rest = b""
        async for piece in self.pieces():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    return
                if event.startswith(b"data: "):
                    await asyncio.sleep(pause)
                    chunk = json.loads(event[6:])
                    yield chunk
                    if "error" in chunk:
                        return
        raise EOFError("the stream ended without [DONE]")


def request_bytes(method: str, path: str, body: bytes | None, length: int | None = None) -> bytes:
    """A request whose declared ``length`` may be wrong."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    if body is not None:
        declared = len(body) if length is None else length
        head += f"Content-Type: application/json\r\nContent-Length: {declared}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


async def fetch(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of one plain request; ``body`` is sent as JSON.

    Raises EOFError also for an answer that does not come.
    """
    data = None if body is None else json.dumps(body).encode()

    async def asked() -> tuple[int, bytes]:
        async with Connection(port) as connection:
            await connection.ask(method, path, data)
            status = await connection.status()
            return status, await connection.body()

    try:
        return await asyncio.wait_for(asked(), PATIENCE)
    except asyncio.TimeoutError:
        raise EOFError(f"{path}: no answer in {PATIENCE:.0f} s") from None
