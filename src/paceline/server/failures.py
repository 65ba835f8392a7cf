"""The errors of requests, with their HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from paceline.core.params import is_unicode, shown
from paceline.errors import CacheMemoryError, ConfigError, GrammarError, PacelineError

INVALID_GRAMMAR = "invalid_schema"
_SERVER_ERROR, _INVALID_REQUEST = "server_error", "invalid_request_error"
# The client should retry on a new connection: it reaches another server, or this one restarted.
_RETRY_ELSEWHERE = {"Retry-After": "5", "Connection": "close"}


class APIError(PacelineError):
    """An error as clients see it. ``kind`` is the field ``type`` of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = _INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})


def deadline_exceeded(by_request: bool) -> APIError:
    """The error for a missed deadline: that of the request (408), or the server's (504)."""
    status, kind = (408, _INVALID_REQUEST) if by_request else (504, _SERVER_ERROR)
    whose = "its own deadline" if by_request else "the server's deadline"
    message = f"the request was not finished by {whose}; ask for fewer tokens"
    return APIError(message, status, kind, code="deadline_exceeded")


queue_full = partial(
    APIError,
    "the queue is full; try again later, or raise max_queue",
    429,
    "rate_limit_error",
    code="queue_full",
    headers={"Retry-After": "1"},
)
_unavailable = partial(APIError, status=503, kind=_SERVER_ERROR, headers=_RETRY_ELSEWHERE)
shutting_down = partial(_unavailable, code="shutting_down")  # takes the message
# The engine has stopped, and this process does not start another.
engine_lost = partial(
    _unavailable,
    "the engine has stopped and the server is ending; try again later",
    code="engine_lost",
)
# The engine failed on this request alone; takes the message.
request_failed = partial(APIError, status=500, kind=_SERVER_ERROR, code="request_failed")
client_gone = partial(APIError, "the client has gone", 499, _SERVER_ERROR, code="cancelled")

# A ConfigError about one field begins with the field's name.
_FIELD_AT_START = re.compile(r"([a-z_]+)(?:: | is | has )")


def as_api_error(error: BaseException) -> APIError:
    """Convert any error. Of unexpected ones neither the message nor the traceback is revealed."""
    if isinstance(error, APIError):
        return error
    # A message may quote lone surrogates of a client, which cannot be encoded.
    message = str(error).encode("utf-8", "replace").decode("utf-8")
    if isinstance(error, CacheMemoryError):
        return APIError(message, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        return APIError(message, code=INVALID_GRAMMAR)  # service.py adds the field
    if isinstance(error, PacelineError):
        named = _FIELD_AT_START.match(message) if isinstance(error, ConfigError) else None
        return APIError(message, param=named and named[1])
    if isinstance(error, RecursionError):
        return APIError("the body is nested too deeply; flatten it", code="invalid_value")
    return APIError("an unexpected error occurred; see the server's log", 500, _SERVER_ERROR)


def check_text(text: str, param: str) -> None:
    r"""Raise APIError if a text has a lone surrogate (as JSON's ``"\ud800"``)."""
    if not is_unicode(text):
        raise APIError(
            f"{param}: {shown(text)} has half a surrogate pair, which is no character", param=param
        )
