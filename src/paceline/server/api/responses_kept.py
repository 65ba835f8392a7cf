"""Responses that later requests may go on from: in memory, within bounds, each for its owner.

They are kept as JSON text, so that their size is known to the byte and nobody changes them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class KeptResponse:
    """``messages`` lead to it and end with it; ``shown`` is what the client was given."""

    messages: list[dict[str, Any]]
    shown: dict[str, Any]


@dataclass(frozen=True)
class _Stored:
    """``items`` are those of the output, by their ids; ``rest`` is everything else."""

    rest: bytes
    items: dict[str, bytes]
    alias: str | None

    @property
    def size(self) -> int:
        return len(self.rest) + sum(map(len, self.items.values())) + len(self.alias or "")


class ResponseStore:
    """By owner and id. An owner is who an API key stands for; without keys all are one.

    A client may give a response an ``alias``: of its own responses, the latest of that name.
    Where the bounds are reached, the owner that has most gives up its oldest: nobody's
    responses go because of another who keeps more.
    """

    def __init__(self) -> None:
        # Of an owner, what has not been asked for the longest comes first.
        self._owners: dict[str, OrderedDict[str, _Stored]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(map(_size, self._owners.values()))

    def keep(self, owner: str, response: KeptResponse, alias: str | None = None) -> None:
        """Its id and those of its items must be new. One beyond all bounds is not kept."""
        shown = response.shown
        items = {item["id"]: _text(item) for item in shown["output"]}
        stored = _Stored(_text([response.messages, shown | {"output": []}]), items, alias)
        if stored.size > MAX_BYTES:
            return
        responses = self._owners.setdefault(owner, OrderedDict())
        if alias is not None:  # the latest has the name
            for name, older in responses.items():
                if older.alias == alias:
                    responses[name] = replace(older, alias=None)
        responses[shown["id"]] = stored
        while (many := len(self) > MAX_RESPONSES) or self.size > MAX_BYTES:
            max(self._owners.values(), key=len if many else _size).popitem(last=False)

    def get(self, owner: str, name: str) -> KeptResponse | None:
        """The response of that id, else of that alias."""
        responses = self._owners.get(owner, OrderedDict())
        if name not in responses:
            name = next((kept for kept, stored in responses.items() if stored.alias == name), "")
        stored = responses.get(name)
        if stored is None:
            return None
        responses.move_to_end(name)
        messages, shown = _value(stored.rest)
        return KeptResponse(messages, shown | {"output": list(map(_value, stored.items.values()))})

    def drop(self, owner: str, name: str) -> None:
        """Forget the response of an id, which is there."""
        del self._owners[owner][name]

    def item(self, owner: str, name: str) -> dict[str, Any] | None:
        """An item of the output of one of the owner's responses."""
        for stored in self._owners.get(owner, OrderedDict()).values():
            if name in stored.items:
                return dict(_value(stored.items[name]))
        return None


def _size(responses: OrderedDict[str, _Stored]) -> int:
    return sum(stored.size for stored in responses.values())


def _text(value: Any) -> bytes:
    """JSON; a client's text may have lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
