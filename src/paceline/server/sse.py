"""Answers as they grow, as server-sent events: one JSON object a chunk, errors as a last one.

All that a step adds to an answer is one write, and no task but the handler's is woken for it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response

from paceline.server.errors import error_body
from paceline.server.failures import APIError, ClientGoneError, as_api_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.request.completion import StreamEvent
    from paceline.server.client import Ticket

log = logging.getLogger("paceline.server")

Chunk = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Answer(ABC):
    """What a request gets, whole or in chunks, in the words of one API.

    ``named``: events have the name that their chunk's ``type`` says, and no ``[DONE]`` follows.
    """

    named: ClassVar[bool] = False

    @abstractmethod
    def whole(self, events: Sequence[StreamEvent]) -> Chunk:
        """All of it at once: every text is one event, those of a prompt one after the other."""

    @abstractmethod
    def feed(self, event: StreamEvent) -> Sequence[Chunk]:
        """What a step has added. Nothing goes out before there is some output."""

    @abstractmethod
    def closing(self) -> Sequence[Chunk]:
        """What follows once all is complete."""

    def failed(self, error: APIError) -> Chunk:
        """The end, where it is none."""
        return error_body(error)


async def respond_with(
    answer: Answer, ticket: Ticket, http: HTTPRequest, streams: bool
) -> Response:
    """The response of a handler that has got its ticket."""
    if streams:
        return EventStream(answer, ticket)
    whole: list[StreamEvent] = []
    async with _attended(ticket, http.receive):
        while events := await ticket.next():
            whole += map(_whole, events)
    return JSONResponse(answer.whole(sorted(whole, key=lambda event: (event.request, event.index))))


def _whole(event: StreamEvent) -> StreamEvent:
    """The only event of a text that is not streamed, with all that its completion has."""
    done = event.completion
    assert done is not None
    return replace(
        event,
        text=done.text,
        token_ids=done.token_ids,
        from_draft=done.draft_mask,
        logprobs=done.logprobs,
        prompt_logprobs=done.prompt_logprobs,
    )


@asynccontextmanager
async def _attended(ticket: Ticket, receive: Receive) -> AsyncIterator[None]:
    """Cancel a ticket that nobody reads any more: after the block, or when the client has closed
    the connection, whose request has been read."""

    async def leave_with_client() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.fail(ClientGoneError())
        ticket.cancel()

    watcher = asyncio.create_task(leave_with_client())
    try:
        yield
    finally:
        watcher.cancel()
        ticket.cancel()


class EventStream(Response):
    """Streams an answer as it comes; a client that goes away cancels the ticket."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, ticket: Ticket) -> None:
        # Not the base's: there is no body yet, and so no length.
        self._answer, self._ticket = answer, ticket
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _attended(self._ticket, receive):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await self._write(send)

    async def _write(self, send: Send) -> None:
        answer, ticket = self._answer, self._ticket
        try:
            while events := await ticket.next():
                chunks = [chunk for event in events for chunk in answer.feed(event)]
                if chunks:
                    body = b"".join(map(self._line, chunks))
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = b"".join(map(self._line, answer.closing()))
            if not answer.named:
                last += b"data: [DONE]\n\n"
        except ClientGoneError:
            return
        except Exception as error:
            # The status line is out; what remains is to say it in the stream.
            shown = as_api_error(error)
            if shown is not error and shown.status >= 500:
                log.warning("a stream ended early: %s", shown)
            last = self._line(answer.failed(shown))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _line(self, chunk: Chunk) -> bytes:
        if not self._answer.named:
            return b"data: %b\n\n" % _encode(chunk)
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), _encode(chunk))
