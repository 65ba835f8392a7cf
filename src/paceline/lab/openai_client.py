"""A client of any server that speaks OpenAI's protocol: whole answers and streams as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from paceline.errors import ConfigError

_MOST_SHOWN = 160  # characters of a server's error


class RequestRefusedError(Exception):
    """The server refused the request (4xx): it may not support a field."""


class ServerFailedError(Exception):
    """The server did not answer, failed (5xx), or its answer is not valid in the protocol."""


class ServerTimeoutError(ServerFailedError):
    """The server did not answer in time."""


@dataclass(frozen=True)
class OpenAIClient:
    """A server at ``url``, which ends in the API version. ``timeout``: seconds without any data.
    ``fields`` are added to every request, the model's name among them. All methods raise
    RequestRefusedError and ServerFailedError."""

    url: str
    key: str | None = None
    timeout: float = 120.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, url: str, key: str | None = None, timeout: float = 120.0) -> OpenAIClient:
        """A client for ``url``, to which /v1 is added if it has no version. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"{url} is no URL; give it as http://HOST:PORT")
        base = url.rstrip("/")
        versioned = re.search(r"/v\d+$", base)
        return cls(base if versioned else f"{base}/v1", key, timeout)

    def models(self) -> list[dict[str, Any]]:
        listed = self.answer("models", None).get("data")
        return [model for model in listed or () if isinstance(model, dict) and "id" in model]

    def answer(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer to a POST of ``body``, or to a GET without a body."""
        with _failing(), self._open(path, body) as response:
            answer = json.load(response)
        if not isinstance(answer, dict):
            raise ServerFailedError("the answer is no JSON object")
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]."""
        with _failing(), self._open(path, {**body, "stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerFailedError(str(chunk["error"])[:_MOST_SHOWN])
                yield chunk
        raise ServerFailedError("a stream ended without [DONE]")

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps({**self.fields, **body}).encode()
        request = Request(f"{self.url}/{path}", data, headers)
        response: HTTPResponse = urlopen(request, timeout=self.timeout)
        return response


@contextmanager
def _failing() -> Iterator[None]:
    """Translate errors of connection and protocol into the exceptions of this module."""
    try:
        yield
    except HTTPError as error:
        body = " ".join(error.read().decode("utf-8", errors="replace").split())[:_MOST_SHOWN]
        kind = RequestRefusedError if 400 <= error.code < 500 else ServerFailedError
        raise kind(f"{error.code} {body}") from None
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ServerTimeoutError("no answer in time") from None
        raise ServerFailedError(str(getattr(error.reason, "strerror", error.reason))) from None
    except TimeoutError:
        raise ServerTimeoutError("no answer in time") from None
    except (OSError, HTTPException, ValueError, TypeError) as error:
        raise ServerFailedError(f"{type(error).__name__}: {error}") from None
