"""The HTTP request being answered, and its line in the log.

The line has method, path, status, seconds and tokens, never content; a stream that breaks off has
its error's status. Its level is info; for successful polls of metrics and health, debug. Every
answer has an ``x-request-id``, the client's if it sent one, and lists ignored fields in
``x-paceline-ignored``.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from paceline.server.client import Ticket

log = logging.getLogger("paceline.server")

_LONGEST_PATH = 200
_MOST_NOTES = 32
# Polled every few seconds: logged at level debug.
_POLLED = frozenset({"/metrics", "/health", "/health/live", "/health/ready", "/load", "/get_load"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Exchange:
    """One HTTP request and its answer. ``began`` by time.time; ``status`` 499: client gone."""

    scope: Scope
    id: str
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    status: int = 499
    ticket: Ticket | None = None
    ignored: dict[str, None] = field(default_factory=dict)  # names, in their order


_exchange: ContextVar[Exchange | None] = ContextVar("paceline_exchange", default=None)


def attach(ticket: Ticket) -> None:
    """Count a ticket's tokens to the HTTP request being answered."""
    exchange = _exchange.get()
    if exchange is not None:
        exchange.ticket = ticket


def note(name: str) -> None:
    """A field of the request being answered is ignored."""
    exchange = _exchange.get()
    if exchange is not None and len(exchange.ignored) < _MOST_NOTES:
        exchange.ignored[re.sub(r"[^ -~]", "?", name)] = None  # it goes into a header


def end_with(status: int) -> None:
    """How the stream that is sent has ended, behind the status of its first line."""
    exchange = _exchange.get()
    if exchange is not None:
        exchange.status = status


def request_id() -> str:
    """Id of the HTTP request being answered."""
    exchange = _exchange.get()
    return exchange.id if exchange is not None else new_id("req_")


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


class RequestLog:
    """Logs each request once its answer is complete and calls ``ended``."""

    def __init__(self, app: ASGIApp, ended: Callable[[Exchange], None] | None = None) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        exchange = Exchange(scope, sent if _REQUEST_ID.fullmatch(sent) else new_id("req_"))
        answered = False

        async def watch(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered, exchange.status = True, message["status"]
                more = [(b"x-request-id", exchange.id.encode())]
                if exchange.ignored:
                    more.append((b"x-paceline-ignored", ", ".join(exchange.ignored).encode()))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        token = _exchange.set(exchange)
        start = time.perf_counter()
        try:
            await self._app(scope, receive, watch)
        except Exception:
            exchange.status = exchange.status if answered else 500  # by an outer handler
            raise
        finally:
            _exchange.reset(token)
            exchange.seconds = time.perf_counter() - start
            _write(exchange)
            if self._ended is not None:
                self._ended(exchange)


def _write(exchange: Exchange) -> None:
    scope, status = exchange.scope, exchange.status
    # Quoted, as a path could break the line; without the query.
    path = quote(scope["path"])[:_LONGEST_PATH]
    counted = f" {exchange.ticket.written} tokens" if exchange.ticket else ""
    if exchange.ignored:
        counted += f" (ignored: {', '.join(exchange.ignored)})"
    polled = scope["path"] in _POLLED and status == 200
    level = logging.DEBUG if polled else logging.INFO
    log.log(level, "%s %s %d %.3f s%s", scope["method"], path, status, exchange.seconds, counted)
