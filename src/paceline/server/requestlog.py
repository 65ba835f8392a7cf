"""The middleware that logs requests, and the record of the request being answered.

A line of the log has method, path, status, seconds and tokens, never content. For a stream that
ends with an error, the status is that of the error. The level is info, but debug for successful
polls of metrics and health. Every response has an ``x-request-id`` (the client's, if it sent one).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.client import Ticket

log = logging.getLogger("paceline.server")

_MAX_PATH_LENGTH = 200
# These are polled every few seconds, so they are logged at level debug.
_POLLED = frozenset({"/metrics", "/health", "/health/live", "/health/ready", "/load", "/get_load"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Exchange:
    """One HTTP request and its response. ``status`` is that with which a stream ended, 499 if the
    client left."""

    scope: Scope
    id: str
    seconds: float = 0.0
    status: int = 499
    ticket: Ticket | None = None


_exchange: ContextVar[Exchange | None] = ContextVar("paceline_exchange", default=None)


def current_exchange() -> Exchange:
    """The HTTP request being answered; a new record outside of requests."""
    return _exchange.get() or Exchange({}, new_id("req_"))


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


class RequestLog:
    """Middleware that logs each request once its response is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        exchange = Exchange(scope, sent if _REQUEST_ID.fullmatch(sent) else new_id("req_"))
        response_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started, exchange.status = True, message["status"]
                added = b"x-request-id", exchange.id.encode()
                message = {**message, "headers": [*message.get("headers", ()), added]}
            await send(message)

        token = _exchange.set(exchange)
        start = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server has shut down, and the client does not read
            exchange.status = 503
        except Exception:
            if not response_started:
                exchange.status = 500  # an outer handler sends it
            raise
        finally:
            _exchange.reset(token)
            exchange.seconds = time.perf_counter() - start
            dropped = exchange.ticket and exchange.ticket.dropped
            if dropped:  # the engine will say how many tokens there were
                dropped.add_done_callback(lambda _: _log_exchange(exchange))
            else:
                _log_exchange(exchange)


def _log_exchange(exchange: Exchange) -> None:
    scope, status = exchange.scope, exchange.status
    # Quoted, since a path may contain line breaks; the query is left out, as it may hold a key.
    path = quote(scope["path"])[:_MAX_PATH_LENGTH]
    details = f" {exchange.ticket.output_tokens} tokens" if exchange.ticket else ""
    polled = scope["path"] in _POLLED and status == 200
    level = logging.DEBUG if polled else logging.INFO
    log.log(level, "%s %s %d %.3f s%s", scope["method"], path, status, exchange.seconds, details)
