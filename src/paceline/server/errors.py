"""Errors in the formats of OpenAI, ``{"error": {message, type, param, code}}``, and Anthropic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paceline.server.failures import APIError, as_api_error
from paceline.server.fields import REFUSED
from paceline.server.requestlog import current_exchange


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


# For the OpenAPI document. Where FastAPI would answer 422, this server answers 400.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid or not allowed."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer the request now."},
}


def openai_body(error: APIError) -> dict[str, Any]:
    details = {"type": error.kind, "param": error.param, "code": error.code}
    return {"error": {"message": str(error), **details}}


# Anthropic's error types by status; for other statuses: invalid_request_error or api_error.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: APIError) -> dict[str, Any]:
    """The body of an error of ``/v1/messages``."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind, message = _ANTHROPIC.get(error.status, default), str(error)
    if error.code == "context_length_exceeded":  # Anthropic's clients look for these words
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": current_exchange().id,
    }


def error_response(error: Exception, path: str) -> JSONResponse:
    """The response for an error of a request to ``path``, in the format of that API."""
    converted = as_api_error(error)
    body = anthropic_body if path.startswith("/v1/messages") else openai_body
    return JSONResponse(body(converted), converted.status, converted.headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a failed request, for example one whose body does not validate."""
    if isinstance(error, RequestValidationError):
        error = validation_error(error.errors(), skip=1)  # every location begins with "body"
    return error_response(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a request with an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI raises this for bytes that are not UTF-8
        return await on_error(request, APIError("the body is not UTF-8 text", code="invalid_json"))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}; GET /docs lists all endpoints"
    refused = APIError(message, error.status_code, code=code, headers=error.headers)
    return await on_error(request, refused)


# Parts of pydantic's locations that are not fields, but members of a union or validators.
_NOT_A_FIELD = re.compile(
    r"(str|int|float|bool)(\W.*)?|(list\[|dict\[|literal\[|function-|[A-Z]).*"
)


def validation_error(
    errors: Sequence[Any], skip: int = 0, renamed: Mapping[str, str] | None = None
) -> APIError:
    """The APIError for pydantic's errors: the first one or, for a union, the one of the member that
    matched furthest. The first ``skip`` parts of locations are left out. For errors within a field
    that is a key of ``renamed``, the message names the value instead."""
    field = errors[0]["loc"][: skip + 1]
    same_field = [one for one in errors if one["loc"][: skip + 1] == field]
    error = max(same_field, key=lambda one: len(one["loc"]))
    location = error["loc"][skip:]
    if location[-1:] == ("[key]",):  # of a key, which may be long, not of its value
        location = location[:-2]
    if renamed and location and location[0] in renamed:
        location = (renamed[location[0]],)
    if error["type"] == "json_invalid":
        return APIError("the body is not valid JSON", code="invalid_json")
    if error["type"] == "extra_forbidden":
        *within, name = map(str, location)
        param = ".".join([*_field_names(within), name])
        message = f"unknown or unsupported field {param!r}; leave it out"
        if name in REFUSED:
            message = f"{param}: {REFUSED[name]}"
        return APIError(message, param=param, code="unknown_field")
    param = ".".join(_field_names(location))
    reason = str(error["msg"]).removeprefix("Value error, ")
    # A rule about several fields names them itself.
    named = not param and error["type"] == "value_error"
    message = reason if named else f"{param or 'the body'}: {reason}"
    return APIError(message, param=param or None, code="invalid_value")


def _field_names(location: Sequence[Any]) -> list[str]:
    return [str(part) for part in location if not _NOT_A_FIELD.fullmatch(str(part))]
