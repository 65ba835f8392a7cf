"""Server-sent events: one JSON object a chunk, ``[DONE]`` at the end, errors as a last chunk.

All that a step adds to an answer is one write, and no task but the handler's is woken for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from fastapi.responses import Response

from paceline.server.errors import as_api_error, error_body
from paceline.server.failures import ClientGoneError
from paceline.server.service import leave_with_client

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.server.client import Ticket
    from paceline.server.records import Event

log = logging.getLogger("paceline.server")

Chunk = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Streamed(Protocol):
    """An answer in chunks."""

    def opening(self) -> Sequence[Chunk]: ...

    def feed(self, event: Event) -> Sequence[Chunk]: ...

    def closing(self) -> Sequence[Chunk]: ...


class EventStream(Response):
    """Streams an answer as it comes; a client that goes away cancels the ticket."""

    media_type = "text/event-stream"

    def __init__(self, answer: Streamed, ticket: Ticket) -> None:
        # Not the base's: there is no body yet, and so no length.
        self._answer, self._ticket = answer, ticket
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(leave_with_client(receive, self._ticket))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await self._write(send)
        finally:
            watcher.cancel()
            self._ticket.cancel()

    async def _write(self, send: Send) -> None:
        answer, ticket = self._answer, self._ticket
        try:
            opening = answer.opening()
            if opening:
                await send(_body(opening))
            while events := await ticket.next():
                chunks = [chunk for event in events for chunk in answer.feed(event)]
                if chunks:
                    await send(_body(chunks))
            last = b"".join([*map(_line, answer.closing()), b"data: [DONE]\n\n"])
        except ClientGoneError:
            return
        except Exception as error:
            # The status line is out; what remains is to say it in the stream.
            shown = as_api_error(error)
            if shown is not error and shown.status >= 500:
                log.warning("a stream ended early: %s", shown)
            last = _line(error_body(shown))
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _line(chunk: Chunk) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)


def _body(chunks: Sequence[Chunk]) -> dict[str, Any]:
    body = b"".join(map(_line, chunks))
    return {"type": "http.response.body", "body": body, "more_body": True}
