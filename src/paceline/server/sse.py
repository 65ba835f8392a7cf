"""Sends answers, either as one JSON object or as server-sent events (SSE).

The tokens of one engine step are sent in one write. If a stream fails, its last event is the error.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.request.completion import StreamEvent
from paceline.server.client import Ticket
from paceline.server.errors import openai_body
from paceline.server.failures import APIError, as_api_error, client_gone
from paceline.server.requestlog import current_exchange

log = logging.getLogger("paceline.server")

Chunk = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Answer(ABC):
    """Builds the answer to one request in the format of one API, either complete or in chunks.
    ``named_events``: SSE events are named by their chunk's ``type``, and no ``[DONE]`` is sent."""

    named_events: ClassVar[bool] = False

    @abstractmethod
    def complete(self, events: Sequence[StreamEvent]) -> Chunk:
        """The complete answer; ``events`` has one event per completion, ordered by prompt."""

    @abstractmethod
    def feed(self, event: StreamEvent) -> Iterable[Chunk]:
        """The chunks for one event; none before there is output."""

    @abstractmethod
    def final_chunks(self) -> Sequence[Chunk]:
        """The chunks after the last event."""

    def error_chunk(self, error: APIError) -> Chunk:
        """The chunk that ends a stream with an error."""
        return openai_body(error)


async def respond_with(
    answer: Answer, ticket: Ticket, http: HTTPRequest, streams: bool
) -> Response:
    """The HTTP response of a handler. The ticket is cancelled if the client disconnects."""
    if streams:
        return EventStream(answer, ticket)

    async def fail_on_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        ticket.fail(client_gone())

    completed: list[StreamEvent] = []
    watcher = asyncio.create_task(fail_on_disconnect())
    try:
        while events := await ticket.next():
            completed += events
    finally:
        watcher.cancel()
        ticket.cancel()
    completed.sort(key=lambda event: (event.request, event.index))
    return JSONResponse(answer.complete(completed))


class EventStream(StreamingResponse):
    """An SSE response that streams an answer and cancels its ticket at the end."""

    def __init__(self, answer: Answer, ticket: Ticket) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._bodies(answer), headers=headers, media_type="text/event-stream")
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()

    async def _bodies(self, answer: Answer) -> AsyncIterator[bytes]:
        exchange, final_status = current_exchange(), self.status_code
        exchange.status = client_gone().status  # unless the stream reaches its end
        try:
            while events := await self._ticket.next():
                chunks = [chunk for event in events for chunk in answer.feed(event)]
                if chunks:
                    yield _encode_events(answer, chunks)
            done = b"" if answer.named_events else b"data: [DONE]\n\n"
            yield _encode_events(answer, answer.final_chunks()) + done
        except Exception as error:
            # The status has been sent already, so the error becomes an event.
            converted = as_api_error(error)
            final_status = converted.status
            if converted is not error and converted.status >= 500:
                log.warning("a stream ended early: %s", converted, exc_info=error)
            yield _encode_events(answer, [answer.error_chunk(converted)])
        exchange.status = final_status


def _encode_events(answer: Answer, chunks: Sequence[Chunk]) -> bytes:
    if not answer.named_events:
        return b"".join(b"data: %b\n\n" % _encode(chunk) for chunk in chunks)
    events = ((chunk["type"].encode(), _encode(chunk)) for chunk in chunks)
    return b"".join(b"event: %b\ndata: %b\n\n" % event for event in events)
