"""What comes in, before it is parsed: its size, its encoding, its type, and the path it came to.

Plain ASGI applications around another, as those of security.py.
"""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.server.errors import APIError, respond
from paceline.server.requestlog import header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SWALLOW_SECONDS = 10.0


class Front:
    """Paths with a slash at their end are those without it; HEAD asks what GET does.

    A body is JSON and says so: what pages of other origins can send unasked is not read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        if path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["method"] == "HEAD":
            # Whoever writes to the socket leaves out the body of an answer to HEAD.
            scope = {**scope, "method": "GET"}
        refused = _wrong_type(scope) if scope["method"] == "POST" else None
        if refused is not None:
            await respond(refused, path)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _wrong_type(scope: Scope) -> APIError | None:
    given = (header(scope, b"content-type") or b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    shown = f"the content type is {kind[:80]!r}" if kind else "there is no content type"
    return APIError(
        f"{shown}; send JSON as Content-Type: application/json", 415, code="unsupported_media_type"
    )


class _GoneError(Exception):
    """The client has left before its request was complete."""


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
            body = await self._read(receive, _content_length(scope))
            body = self._unpacked(body, header(scope, b"content-encoding") or b"")
        except _GoneError:
            return
        except APIError as error:
            response = respond(error, scope["path"])
            if error.status == 413:
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    def _too_large(self) -> APIError:
        return APIError(
            f"the request is larger than {self._limit} bytes", 413, code="request_too_large"
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
            found = unpacker.decompress(body, self._limit + 1)
        except zlib.error:
            raise APIError("the body cannot be unpacked", code="invalid_encoding") from None
        if len(found) > self._limit:
            raise self._too_large()
        if not unpacker.eof:
            raise APIError("the packed body is cut short", code="invalid_encoding")
        return found

    async def _read(self, receive: Receive, declared: int) -> bytes:
        """The whole body. Raises APIError if it is too large, _GoneError if nobody waits."""
        parts: list[bytes] = []
        size, more = 0, True
        if declared <= self._limit:
            while more and size <= self._limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
            if size <= self._limit:
                return b"".join(parts)
        # A connection that is closed while the client still sends is reset, and the client then
        # never sees the answer. So swallow what comes, but neither for long nor without end.
        if more and declared <= 8 * self._limit:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._swallow(receive, size), _SWALLOW_SECONDS)
        raise self._too_large()

    async def _swallow(self, receive: Receive, size: int) -> None:
        more = True
        while more and size <= 8 * self._limit:
            message = await receive()
            size += len(message.get("body", b""))
            more = message["type"] != "http.disconnect" and message.get("more_body", False)


def _content_length(scope: Scope) -> int:
    """As declared; 0 if it is not. HTTP parsers have refused what is no number."""
    declared = header(scope, b"content-length") or b""
    return int(declared) if declared.isdigit() else 0
