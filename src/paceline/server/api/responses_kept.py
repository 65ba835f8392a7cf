"""Responses that later requests may go on from: in memory, within bounds, each for its owner.

They are kept as JSON text, so that their size is known to the byte and nobody changes them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
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


@dataclass
class _Shelf:
    """What one owner has; what has not been asked for the longest comes first."""

    stored: OrderedDict[str, _Stored] = field(default_factory=OrderedDict)
    aliases: dict[str, str] = field(default_factory=dict)
    items: dict[str, bytes] = field(default_factory=dict)
    size: int = 0

    def put(self, name: str, stored: _Stored) -> None:
        self.stored[name] = stored
        self.items |= stored.items
        if stored.alias is not None:
            self.aliases[stored.alias] = name
        self.size += stored.size

    def drop(self, name: str) -> None:
        stored = self.stored.pop(name)
        for item in stored.items:
            del self.items[item]
        if stored.alias is not None and self.aliases.get(stored.alias) == name:
            del self.aliases[stored.alias]
        self.size -= stored.size


class ResponseStore:
    """By owner and id. An owner is who an API key stands for; without keys all are one.

    A client may give a response an ``alias``: of its own responses, the latest of that name.
    Where the bounds are reached, the owner that has most gives up its oldest: nobody's
    responses go because of another who keeps more.
    """

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._shelves.values())

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(shelf.size for shelf in self._shelves.values())

    def keep(self, owner: str, response: KeptResponse, alias: str | None = None) -> None:
        """Its id and those of its items must be new. One beyond all bounds is not kept."""
        shown = response.shown
        items = {item["id"]: _text(item) for item in shown["output"]}
        stored = _Stored(_text([response.messages, shown | {"output": []}]), items, alias)
        if stored.size > MAX_BYTES:
            return
        self._shelves.setdefault(owner, _Shelf()).put(shown["id"], stored)
        while (many := len(self) > MAX_RESPONSES) or self.size > MAX_BYTES:
            fullest = max(
                self._shelves.values(), key=lambda own: len(own.stored) if many else own.size
            )
            fullest.drop(next(iter(fullest.stored)))

    def get(self, owner: str, name: str) -> KeptResponse | None:
        """The response of that id, else of that alias."""
        shelf = self._shelves.get(owner, _Shelf())
        name = name if name in shelf.stored else shelf.aliases.get(name, name)
        stored = shelf.stored.get(name)
        if stored is None:
            return None
        shelf.stored.move_to_end(name)
        messages, shown = _value(stored.rest)
        return KeptResponse(messages, shown | {"output": list(map(_value, stored.items.values()))})

    def drop(self, owner: str, name: str) -> None:
        """Forget the response of an id, which is there."""
        self._shelves[owner].drop(name)

    def item(self, owner: str, name: str) -> dict[str, Any] | None:
        """An item of the output of one of the owner's responses."""
        text = self._shelves.get(owner, _Shelf()).items.get(name)
        return None if text is None else dict(_value(text))


def _text(value: Any) -> bytes:
    """JSON; a client's text may have lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
