"""Errors as OpenAI's API has them, ``{"error": {message, type, param, code}}``, and Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from paceline.core.keywords import did_you_mean, our_name
from paceline.server.failures import APIError, as_api_error
from paceline.server.fields import REFUSED, known_fields
from paceline.server.requestlog import request_id

# Of a name that is suggested, by difflib: a slip of the finger, not another thing (length_penalty).
_LIKE = 0.8


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


# For the OpenAPI document; FastAPI's own 422 is our 400.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it now."},
}


def error_body(error: APIError) -> dict[str, Any]:
    details = {"type": error.kind, "param": error.param, "code": error.code}
    return {"error": {"message": str(error), **details}}


# Anthropic's names by status; others are invalid_request_error or api_error.
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
    """The body for clients of ``/v1/messages``."""
    known = "invalid_request_error" if error.status < 500 else "api_error"
    kind, message = _ANTHROPIC.get(error.status, known), str(error)
    if error.code == "context_length_exceeded":  # the message its clients match
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id(),
    }


def respond(error: Exception, path: str = "") -> JSONResponse:
    """The response to a request for ``path``, in the form of its API."""
    shown = as_api_error(error)
    body = anthropic_body if path.startswith("/v1/messages") else error_body
    return JSONResponse(body(shown), shown.status, shown.headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    return respond(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    if error.status_code == 400:  # FastAPI's of bytes that are no text
        bad = APIError("the body is not UTF-8 text", code="invalid_json")
        return respond(bad, request.url.path)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        lists = "GET /docs lists what there is"
        message += f"; {did_you_mean(request.url.path, paths, lists, _LIKE)}"
    headers = error.headers or {}
    if "Allow" in headers:
        message += f"; use {headers['Allow']}"
    response = respond(APIError(message, error.status_code, code=code), request.url.path)
    response.headers.update(headers)
    return response


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """A body that does not validate: its first complaint."""
    assert isinstance(error, RequestValidationError)
    # Every location begins with "body".
    return respond(invalid(error.errors(), skip=1), request.url.path)


# Parts of pydantic's locations that name a member of a union, or a check.
_TRIED = re.compile(r"(str|int|float|bool)(\W.*)?|(list\[|dict\[|literal\[|function-|[A-Z]).*")

# The field that a message about a whole body begins with; pydantic's name of a JSON object.
_ABOUT = re.compile(r"([a-z_]+) (?:and|goes|is|names|needs)\b")
_OBJECT = re.compile(r"dictionary( or instance of \w+)?")


def invalid(
    complaints: Sequence[Any], skip: int = 0, renamed: Mapping[str, str] | None = None
) -> APIError:
    """The first of pydantic's complaints; for a union the one that got furthest. ``skip``: leading
    parts of locations to leave out. Complaints within a ``renamed`` field name the other field."""
    first = complaints[0]
    field = first["loc"][: skip + 1]
    same = [one for one in complaints if one["loc"][: skip + 1] == field]
    complaint = max(same, key=lambda one: len(one["loc"]))
    location = complaint["loc"][skip:]
    if renamed and location and location[0] in renamed:
        location = (renamed[location[0]],)
    unknown = complaint["type"] == "extra_forbidden"
    # The last part is then the name that a client gave, whatever it looks like.
    tried = location[:-1] if unknown else location
    names = [str(part) for part in tried if not _TRIED.fullmatch(str(part))]
    names += [str(location[-1])] if unknown else []
    param = ".".join(names)
    if unknown:
        reason = REFUSED.get(names[-1])
        others = known_fields() - {names[-1]}  # a field of another part is none here
        ours = our_name(names[-1], others)
        advice = did_you_mean(names[-1], others, "leave it out", _LIKE)
        advice = f"it is {ours} here" if ours in others else advice
        message = f"unknown or unsupported field {param!r}; {advice}"
        message = message if reason is None else f"{param}: {reason}"
        return APIError(message, param=param, code="unknown_field")
    if complaint["type"] == "json_invalid":
        return APIError("the body is not valid JSON", code="invalid_json")
    reason = _OBJECT.sub("object", str(complaint["msg"]).removeprefix("Value error, "))
    if not location:
        if complaint["type"] == "missing":
            return APIError("the body is empty; send a JSON object", code="invalid_json")
        if complaint["type"] in ("model_attributes_type", "model_type"):
            return APIError("the body is no JSON object; send one", code="invalid_value")
    if not param:  # about the whole body: the message begins with the field
        about = _ABOUT.match(reason)
        return APIError(reason, param=about[1] if about else None, code="invalid_value")
    return APIError(f"{param}: {reason}", param=param, code="invalid_value")
