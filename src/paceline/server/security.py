"""Checks that run before the application: content types, API keys and body sizes.

request log -> CORS -> host name -> content type -> API key -> body size -> the application"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import ConfigError
from paceline.server.errors import error_response
from paceline.server.failures import APIError, shutting_down

KEYS_VARIABLE = "PACELINE_API_KEYS"
# Paths that need no API key: they reveal neither prompts nor answers.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/health/live", "/health/ready", "/version"})
_OWNER = "paceline.owner"  # the key of the ASGI scope under which ``owner_of`` is stored


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True)
class Keys:
    """SHA-256 digests of the API keys."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        return cls(tuple(_digest(key.encode()) for key in dict.fromkeys(keys)))

    @classmethod
    def load(cls, file: str | Path | None, environ: Mapping[str, str] = os.environ) -> Keys:
        """Read the keys from the file (one per line, ``#`` comments) and from PACELINE_API_KEYS
        (separated by commas or spaces). Raises ConfigError if either is given but has no key."""
        file_keys = [] if file is None else _keys_in_file(file)
        variable = environ.get(KEYS_VARIABLE)
        if variable is not None:
            keys = [key for key in re.split(r"[,\s]+", variable) if key]
            file_keys += _validated(keys, KEYS_VARIABLE)
        return cls.of(file_keys)

    def __len__(self) -> int:
        return len(self.digests)

    def contains(self, key: bytes) -> bool:
        """Whether ``key`` is one of the keys; takes the same time for every key."""
        digest_of_key = _digest(key)
        return any([hmac.compare_digest(digest_of_key, digest) for digest in self.digests])

    def check_key(self, scope: Scope) -> APIError | None:
        """An error unless the key is valid or the path open. The owner goes into the scope."""
        if scope["path"] in OPEN_PATHS:
            return None
        key = key_of(scope)
        if key is None or not self.contains(key):
            problem = "an API key is needed" if key is None else "the API key is not valid"
            message = f"{problem}; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return APIError(message, 401, code="invalid_api_key", headers=headers)
        scope[_OWNER] = _digest(key).hex()
        return None


def _keys_in_file(path: str | Path) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"API key file {path} is not text; write one key per line") from None
    lines = [line.strip() for line in text.splitlines()]
    return _validated([x for x in lines if x and not x.startswith("#")], f"API key file {path}")


def _validated(keys: list[str], where: str) -> list[str]:
    if not keys:
        raise ConfigError(f"{where} has no key; add one, or leave it out to serve without keys")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"{where}: a key has characters other than printable ASCII")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a host can be reached only from this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def exposure_warning(host: str, keys: Keys) -> str | None:
    """A warning if other machines can use a server on ``host`` without an API key."""
    if keys or is_loopback(host):
        return None
    return (
        f"other machines can reach {host} and no API keys are set, so anybody may use this "
        f"server; set --api-key-file or {KEYS_VARIABLE}"
    )


def owner_of(scope: Scope) -> str:
    """An identifier of the request's API key; "" if the server has no keys."""
    return str(scope.get(_OWNER, ""))


def key_of(scope: Scope) -> bytes | None:
    """The key in the header Authorization, or in x-api-key (sent by Anthropic's clients)."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return (bearer or headers.get("x-api-key", "").strip()).encode("latin-1") or None


def check_content_type(scope: Scope) -> APIError | None:
    """An error unless the body is declared as JSON: pages of any origin may send other types."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] != "POST" or kind == "application/json":
        return None
    message = f"the content type is {kind[:80]!r}; send JSON as Content-Type: application/json"
    return APIError(message, 415, code="unsupported_media_type")


class Gate:
    """Middleware that runs the ``checks``, reads the whole body and normalises path and method. A
    slash at the end of a path is dropped, and HEAD becomes GET. Bodies of more than ``limit`` bytes
    are refused before they are parsed, whatever their Content-Length says."""

    def __init__(
        self, app: ASGIApp, checks: Sequence[Callable[[Scope], APIError | None]], limit: int
    ) -> None:
        self._app, self._checks, self._limit = app, checks, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        # The HTTP server leaves out the body of a response to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "raw_path": path.encode(), "method": method}
        try:
            for check in self._checks:
                if (refused := check(scope)) is not None:
                    raise refused
            body = await self._read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the client has stopped sending, and the server ends
            refused = shutting_down("the server has shut down")
            await error_response(refused, path)(scope, receive, send)
            return
        except APIError as error:
            await error_response(error, path)(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body_first() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_body_first, send)

    async def _read_body(self, request: Request) -> bytes:
        """Raises APIError if the body is too large, ClientDisconnect if the client has gone."""
        # The HTTP parser has checked that this is a number.
        declared = int(request.headers.get("content-length") or 0)
        # Closing the connection while the client sends would reset it, and the client would not
        # see the error. So up to eight times the limit is read before that.
        body, size, read_limit = bytearray(), 0, 8 * self._limit
        if declared <= read_limit:
            async for part in request.stream():
                size += len(part)
                if size <= self._limit:
                    body += part
                elif size > read_limit:
                    break
        if max(size, declared) > self._limit:
            raise APIError(
                f"the request is larger than {self._limit} bytes",
                413,
                code="request_too_large",
                headers={"Connection": "close"},
            )
        return bytes(body)
