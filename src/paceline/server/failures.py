"""How requests fail, with the HTTP status of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from paceline.core.params import is_unicode, shown
from paceline.errors import CacheMemoryError, ConfigError, GrammarError, PacelineError

_OURS, _THEIRS = "server_error", "invalid_request_error"
# Retry on another connection: another server, or this one restarted.
_ELSEWHERE = {"Retry-After": "5", "Connection": "close"}


class APIError(PacelineError):
    """An error as clients see it: status, headers, OpenAI's ``type`` (``kind``) and the rest."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = _THEIRS,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})


def busy(message: str, retry_after: int) -> APIError:
    """The queue is full; ``retry_after`` in seconds."""
    headers = {"Retry-After": str(retry_after)}
    return APIError(message, 429, "rate_limit_error", code="queue_full", headers=headers)


def too_late(by_request: bool) -> APIError:
    """A request missed its own deadline, or the server's."""
    status, kind = (408, _THEIRS) if by_request else (504, _OURS)
    whose = "its own deadline" if by_request else "the server's deadline"
    message = f"the request was not done by {whose}; ask for fewer tokens"
    return APIError(message, status, kind, code="deadline_exceeded")


_ended = partial(APIError, status=503, kind=_OURS, headers=_ELSEWHERE)
draining = partial(_ended, code="shutting_down")  # of a message
# The engine has stopped, and this process will not start another.
engine_lost = partial(
    _ended, "the engine has stopped and the server is ending; try again later", code="engine_lost"
)
# The engine failed on this request alone, which the message says.
request_failed = partial(APIError, status=500, kind=_OURS, code="request_failed")
client_gone = partial(APIError, "the client has gone", 499, _OURS, code="cancelled")

# The beginning of a ConfigError about one field.
_NAMED = re.compile(r"([a-z_]+)(?:: | is | has )")


def as_api_error(error: BaseException) -> APIError:
    """Any error as an APIError, without traceback, path or internals."""
    if isinstance(error, APIError):
        return error
    # A message may quote a client's lone surrogates, which cannot be encoded.
    message = str(error).encode("utf-8", "replace").decode("utf-8")
    if isinstance(error, CacheMemoryError):
        return APIError(message, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        return APIError(message, param="response_format", code="invalid_schema")
    if isinstance(error, PacelineError):
        named = _NAMED.match(message) if isinstance(error, ConfigError) else None
        return APIError(message, param=named and named[1])
    if isinstance(error, RecursionError):
        return APIError("the body is nested too deeply; flatten it", code="invalid_value")
    return APIError("an unexpected error occurred; see the server's log", 500, _OURS)


def check_text(text: str, param: str) -> None:
    r"""Raises APIError if a text has lone surrogates (JSON's ``"\ud800"`` alone)."""
    if not is_unicode(text):
        raise APIError(
            f"{param}: {shown(text)} has half a surrogate pair, which is no character", param=param
        )
