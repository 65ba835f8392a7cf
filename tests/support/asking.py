"""Raw HTTP, for tests of what clients send and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from typing import Any


@dataclass
class Reply:
    status: int
    headers: Message
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream but for ``[DONE]``."""
        lines = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def ask(
    url: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> Reply:
    """One request; a body is JSON unless it is bytes."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    given = {name: value for name, value in given.items() if value}
    connection.request(method or ("GET" if body is None else "POST"), path, data, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return Reply(answer.status, answer.headers, text)
