"""One line in the log for every request: method, path, status, seconds, tokens; never content.

At level info; answered polls of metrics and health at level debug.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from paceline.server.client import Ticket

log = logging.getLogger("paceline.server")

# The tickets that the HTTP request in this context has led to.
_account: ContextVar[list[Ticket] | None] = ContextVar("paceline_account", default=None)
_LONGEST_PATH = 200
# Asked every few seconds by machines; a line each would bury the rest.
_POLLED = frozenset({"/metrics", "/health", "/health/live", "/health/ready"})


def charge(ticket: Ticket) -> None:
    """Count its tokens to the HTTP request that is being answered, if it is logged."""
    account = _account.get()
    if account is not None:
        account.append(ticket)


class RequestLog:
    """Logs a request once its answer is complete, streamed or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        account: list[Ticket] = []
        token = _account.set(account)
        start = time.perf_counter()
        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = status or 500  # which is answered outside of us
            raise
        finally:
            _account.reset(token)
            # Who left before there was an answer got none: 499, as proxies call it.
            _write(scope, status or 499, time.perf_counter() - start, account)


def _write(scope: Scope, status: int, seconds: float, account: Sequence[Ticket]) -> None:
    # Quoted again, for a path could otherwise break the line; without the query.
    path = quote(scope["path"])[:_LONGEST_PATH]
    tokens = sum(ticket.written for ticket in account)
    counted = f" {tokens} tokens" if account else ""
    polled = scope["path"] in _POLLED and status == 200
    level = logging.DEBUG if polled else logging.INFO
    log.log(level, "%s %s %d %.3f s%s", scope["method"], path, status, seconds, counted)
