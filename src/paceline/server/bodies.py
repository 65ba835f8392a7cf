"""What comes in, before it is parsed: its path, its type, its encoding and its size.

Plain ASGI applications around another, so that they see a request before anything of it is parsed.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request

from paceline.server.errors import respond
from paceline.server.failures import APIError
from paceline.server.requestlog import header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SWALLOW_SECONDS = 10.0


class Guard:
    """Answers a request itself where ``check`` says why it is refused."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], APIError | None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._check(scope) if scope["type"] == "http" else None
        app = self._app if refused is None else respond(refused, scope["path"])
        await app(scope, receive, send)


def wrong_type(scope: Scope) -> APIError | None:
    """A body is JSON and says so: what pages of other origins can send unasked is not read."""
    if scope["method"] != "POST":
        return None
    given = (header(scope, b"content-type") or b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    shown = f"the content type is {kind[:80]!r}" if kind else "there is no content type"
    return APIError(
        f"{shown}; send JSON as Content-Type: application/json", 415, code="unsupported_media_type"
    )


class OnePath:
    """Paths with a slash at their end are those without it; HEAD asks what GET does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            # Whoever writes to the socket leaves out the body of an answer to HEAD.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "path": path, "raw_path": path.encode(), "method": method}
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size, whatever their Content-Length says, before they are parsed.

    What comes as gzip or deflate is unpacked, and may not be larger unpacked either.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Request(scope, receive))
            body = self._unpacked(body, header(scope, b"content-encoding") or b"")
        except ClientDisconnect:
            return
        except APIError as error:
            await respond(error, scope["path"])(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    def _too_large(self) -> APIError:
        return APIError(
            f"the request is larger than {self._limit} bytes",
            413,
            code="request_too_large",
            headers={"Connection": "close"},
        )

    def _unpacked(self, body: bytes, encoding: bytes) -> bytes:
        """Raises APIError for what cannot be unpacked, or is too large then."""
        name = encoding.strip().lower()
        if name in (b"", b"identity"):
            return body
        if name not in (b"gzip", b"x-gzip", b"deflate"):
            raise APIError(
                f"the content encoding is {name.decode('latin-1')[:40]!r}; send gzip, or as it is",
                415,
                code="unsupported_encoding",
            )
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # with either head
        try:
            unpacked = unpacker.decompress(body, self._limit + 1)
        except zlib.error:
            raise APIError("the body cannot be unpacked", code="invalid_encoding") from None
        if len(unpacked) > self._limit:
            raise self._too_large()
        if not unpacker.eof:
            raise APIError("the packed body is cut short", code="invalid_encoding")
        return unpacked

    async def _read(self, request: Request) -> bytes:
        """The whole body. Raises APIError if it is too large, ClientDisconnect if nobody waits."""
        # As declared; HTTP parsers have refused what is no number.
        declared = int(request.headers.get("content-length") or 0)
        stream = request.stream()
        body = bytearray()
        if declared <= self._limit:
            async for part in stream:
                body += part
                if len(body) > self._limit:
                    break
            else:
                return bytes(body)
        # A connection that is closed while the client still sends is reset, and the client then
        # never sees the answer. So swallow what comes, but neither for long nor without end.
        if declared <= 8 * self._limit:
            with suppress(asyncio.TimeoutError, ClientDisconnect):
                await asyncio.wait_for(self._swallow(stream, len(body)), _SWALLOW_SECONDS)
        raise self._too_large()

    async def _swallow(self, stream: AsyncIterator[bytes], size: int) -> None:
        async for part in stream:
            size += len(part)
            if size > 8 * self._limit:
                return
