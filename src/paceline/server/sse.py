"""Answers, whole or as server-sent events of one JSON object each; an error is the last event. What
one step adds is one write."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from paceline.server.errors import error_body
from paceline.server.failures import APIError, as_api_error, client_gone
from paceline.server.requestlog import end_with

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.request.completion import StreamEvent
    from paceline.server.client import Ticket

log = logging.getLogger("paceline.server")

Chunk = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Answer(ABC):
    """An answer in the form of one API, whole or in chunks. ``named``: events are named by their
    chunk's ``type``, and no ``[DONE]`` follows."""

    named: ClassVar[bool] = False

    @abstractmethod
    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        """The whole answer; ``events`` has one event for each text, prompt after prompt."""

    @abstractmethod
    def feed(self, event: StreamEvent) -> Iterable[Chunk]:
        """The chunks of one event. Nothing is sent before there is output."""

    @abstractmethod
    def closing(self) -> Sequence[Chunk]:
        """The chunks after the last event."""

    def failed(self, error: APIError) -> Chunk:
        """The chunk that ends a stream with an error."""
        return error_body(error)


async def respond_with(
    answer: Answer, ticket: Ticket, http: HTTPRequest, streams: bool
) -> Response:
    """The response of a handler; its ticket is cancelled if the client disconnects."""
    if streams:
        return EventStream(answer, ticket)

    async def leave_with_client() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        ticket.fail(client_gone())

    whole: list[StreamEvent] = []
    watcher = asyncio.create_task(leave_with_client())
    try:
        while events := await ticket.next():
            whole += map(_whole, events)
    finally:
        watcher.cancel()
        ticket.cancel()
    return JSONResponse(answer.whole(sorted(whole, key=lambda event: (event.request, event.index))))


def _whole(event: StreamEvent) -> StreamEvent:
    """The only event of a text that is not streamed, filled from its completion."""
    done = event.completion
    assert done is not None
    same = ("text", "token_ids", "logprobs", "prompt_logprobs")
    values = {name: getattr(done, name) for name in same}
    return replace(event, from_draft=done.draft_mask, **values)


class EventStream(StreamingResponse):
    """Streams an answer and cancels its ticket at the end."""

    def __init__(self, answer: Answer, ticket: Ticket) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        bodies = self._bodies(answer)
        super().__init__(bodies, headers=headers, media_type="text/event-stream")
        self._ticket = ticket
        self._outcome = client_gone().status  # of a stream that is left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()
            end_with(self._outcome)

    async def _bodies(self, answer: Answer) -> AsyncIterator[bytes]:
        outcome = self.status_code
        try:
            while events := await self._ticket.next():
                chunks = [chunk for event in events for chunk in answer.feed(event)]
                if chunks:
                    yield _lines(answer, chunks)
            done = b"" if answer.named else b"data: [DONE]\n\n"
            yield _lines(answer, answer.closing()) + done
        except Exception as error:
            # The status line has been sent: the error is an event.
            shown = as_api_error(error)
            outcome = shown.status
            if shown is not error and shown.status >= 500:
                log.warning("a stream ended early: %s", shown, exc_info=error)
            yield _lines(answer, [answer.failed(shown)])
        self._outcome = outcome


def _lines(answer: Answer, chunks: Sequence[Chunk]) -> bytes:
    if not answer.named:
        return b"".join(b"data: %b\n\n" % _encode(chunk) for chunk in chunks)
    events = ((chunk["type"].encode(), _encode(chunk)) for chunk in chunks)
    return b"".join(b"event: %b\ndata: %b\n\n" % event for event in events)
