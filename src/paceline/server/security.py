"""Checks before the application: keys, hosts, content types and body sizes.

request log -> CORS -> host -> type -> API key -> size -> the application
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from paceline.errors import ConfigError
from paceline.server.errors import respond
from paceline.server.failures import APIError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEYS_VARIABLE = "PACELINE_API_KEYS"
# These do not reveal prompts or answers.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/health/live", "/health/ready", "/version"})
_OWNER = "paceline.owner"  # in the scope: whose key the request has


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
        """The keys in the file (one a line, ``#`` comments) and in PACELINE_API_KEYS (separated by
        commas or spaces). Raises ConfigError if either is given but has none."""
        file_keys = [] if file is None else _keys_in_file(file)
        variable = environ.get(KEYS_VARIABLE)
        if variable is not None:
            keys = [key for key in re.split(r"[,\s]+", variable) if key]
            file_keys += _checked(keys, KEYS_VARIABLE)
        return cls.of(file_keys)

    def __len__(self) -> int:
        return len(self.digests)

    def know(self, key: bytes) -> bool:
        """Whether it is one of them, in constant time."""
        digest_of_key = _digest(key)
        return any([hmac.compare_digest(digest_of_key, digest) for digest in self.digests])

    def refusal(self, scope: Scope) -> APIError | None:
        """An error unless the key is valid or the path open. Stores the owner in the scope."""
        if scope["path"] in OPEN_PATHS:
            return None
        key = bearer(scope)
        if key is None or not self.know(key):
            what = "an API key is needed" if key is None else "the API key is not known here"
            message = f"{what}; send it as Authorization: Bearer KEY"
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
        raise ConfigError(f"API key file {path} is not text; write one key a line") from None
    lines = [line.strip() for line in text.splitlines()]
    return _checked([x for x in lines if x and not x.startswith("#")], f"API key file {path}")


def _checked(keys: list[str], where: str) -> list[str]:
    if not keys:
        raise ConfigError(f"{where} holds no key; write one, or leave it out to serve anybody")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(f"{where}: a key has other than ASCII letters, digits and signs")
    return keys


def key_file_warning(path: str | Path) -> str | None:
    """A warning if other users can read the file."""
    if Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) == 0:
        return None
    return f"API key file {path} can be read by other users; run: chmod 600 {path}"


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def exposure_warning(host: str, keys: Keys) -> str | None:
    """A warning if a server on ``host`` is open to other machines without keys."""
    if keys or is_loopback(host):
        return None
    return (
        f"{host} can be reached from other machines and no API keys are set: anybody may use this "
        f"server; set --api-key-file or {KEYS_VARIABLE}"
    )


def wrong_host(scope: Scope) -> APIError | None:
    """An error if the Host header is not a loopback name. A page elsewhere can point its own name
    at our address (DNS rebinding); a browser then lets its scripts read our answers."""
    hosts = Headers(scope=scope).getlist("host")
    if all(is_loopback(re.sub(r"(?<!:):\d+$", "", host)) for host in hosts):  # without a port
        return None
    return APIError(
        "a server without API keys on a loopback address answers to localhost and 127.0.0.1 only; "
        "give it keys to use another name",
        403,
        code="host_not_allowed",
    )


def owner_of(scope: Scope) -> str:
    """One name for each API key; "" without keys."""
    return str(scope.get(_OWNER, ""))


def bearer(scope: Scope) -> bytes | None:
    """The key in an Authorization header, or in x-api-key (Anthropic's clients)."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    known = key.strip() if scheme.lower() == "bearer" else ""
    return (known or headers.get("x-api-key", "").strip()).encode("latin-1") or None


def wrong_type(scope: Scope) -> APIError | None:
    """An error unless a body is declared as JSON: pages of other origins can send other types."""
    if scope["method"] != "POST":
        return None
    headers = Headers(scope=scope)
    packed = headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        message = f"the content encoding is {packed[:40]!r}; send the body as it is"
        return APIError(message, 415, code="unsupported_encoding")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    shown = f"the content type is {kind[:80]!r}" if kind else "there is no content type"
    return APIError(
        f"{shown}; send JSON as Content-Type: application/json", 415, code="unsupported_media_type"
    )


class Gate:
    """Runs the ``checks``, reads the whole body and normalises path and method.

    A slash at the end of a path is dropped; HEAD becomes GET. Bodies above ``limit`` bytes are
    refused before they are parsed, whatever their Content-Length says.
    """

    def __init__(
        self, app: ASGIApp, checks: Sequence[Callable[[Scope], APIError | None]], limit: int
    ) -> None:
        self._app, self._checks, self._limit = app, checks, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        # The HTTP server omits the body of an answer to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "raw_path": path.encode(), "method": method}
        try:
            for check in self._checks:
                if (refused := check(scope)) is not None:
                    raise refused
            body = await self._read(Request(scope, receive))
        except ClientDisconnect:
            return
        except APIError as error:
            await respond(error, path)(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read(self, request: Request) -> bytes:
        """The body. Raises APIError if it is too large, ClientDisconnect if the client has gone."""
        # The HTTP parser has checked that it is a number.
        declared = int(request.headers.get("content-length") or 0)
        # Closing while the client sends resets the connection, and the client never sees the
        # answer: so read on for a while.
        body, size, most = bytearray(), 0, 8 * self._limit
        if declared <= most:
            async for part in request.stream():
                size += len(part)
                if size <= self._limit:
                    body += part
                elif size > most:
                    break
        if max(size, declared) > self._limit:
            raise APIError(
                f"the request is larger than {self._limit} bytes",
                413,
                code="request_too_large",
                headers={"Connection": "close"},
            )
        return bytes(body)
