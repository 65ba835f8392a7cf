"""Errors as OpenAI's API tells them: ``{"error": {message, type, param, code}}`` and a status."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paceline.errors import CacheMemoryError, GrammarError, PacelineError
from paceline.server.failures import (
    BusyError,
    ClientGoneError,
    DeadlineError,
    DrainingError,
    EngineError,
    GoneError,
    RequestFailedError,
    SlowReaderError,
)


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetails


# For the OpenAPI document; FastAPI's own 422 is our 400.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it now."},
}


class APIError(PacelineError):
    """An error with its HTTP status and OpenAI's ``type``, ``param`` and ``code``."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


def as_api_error(error: Exception) -> APIError:
    """Whatever went wrong, as a client may see it: no traceback, no path, no internals."""
    message = str(error)
    if isinstance(error, APIError):
        return error
    if isinstance(error, BusyError):
        return APIError(message, 429, "rate_limit_error", code="queue_full")
    if isinstance(error, DrainingError):
        return APIError(message, 503, "server_error", code="shutting_down")
    if isinstance(error, DeadlineError):
        status, kind = (408, "invalid_request_error") if error.own else (504, "server_error")
        return APIError(message, status, kind, code="deadline_exceeded")
    if isinstance(error, CacheMemoryError):
        return APIError(message, 400, code="context_length_exceeded")
    if isinstance(error, GoneError):
        return APIError(message, 503, "server_error", code="engine_lost")
    if isinstance(error, ClientGoneError):
        return APIError("the client has gone", 499, "server_error", code="cancelled")
    if isinstance(error, SlowReaderError):
        return APIError(message, 408, code="slow_reader")
    if isinstance(error, RequestFailedError):
        return APIError(message, 500, "server_error", code="request_failed")
    if isinstance(error, EngineError):
        return APIError(message, 500, "server_error")
    if isinstance(error, GrammarError):
        return APIError(message, 400, param="response_format", code="invalid_schema")
    if isinstance(error, PacelineError):
        return APIError(message, 400)
    if isinstance(error, RecursionError):
        return APIError("the body is nested too deeply; flatten it", 400, code="invalid_value")
    return APIError("an unexpected error occurred; see the server's log", 500, "server_error")


def error_body(error: APIError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def respond(error: Exception) -> JSONResponse:
    shown = as_api_error(error)
    headers = {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, (DrainingError, GoneError)):
        # Another server, or this one started again, will answer on another connection.
        headers |= {"Retry-After": "5", "Connection": "close"}
    if shown.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(shown), shown.status, headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    return respond(error)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = respond(APIError(message, error.status_code, code=code))
    response.headers.update(error.headers or {})
    return response


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """A body that does not fit: the first complaint, with the field it is about."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The place begins with "body"; the rest reads like messages.0.role.
    place = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "extra_forbidden":
        message, code = f"unknown or unsupported field {place!r}; leave it out", "unknown_field"
    elif first["type"] == "json_invalid":
        message, code = "the body is not valid JSON", "invalid_json"
    else:
        reason = str(first["msg"]).removeprefix("Value error, ")
        message, code = f"{place or 'body'}: {reason}", "invalid_value"
    return respond(APIError(message, 400, param=place or None, code=code))
