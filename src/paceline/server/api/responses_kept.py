"""Responses that later requests may go on from: in memory, within bounds, each for its owner.

They are kept as JSON text, so that their size is known to the byte and nobody changes them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class KeptResponse:
    """``messages`` lead to it and end with it; ``shown`` is what the client was given.

    ``alias`` is the client's own name for it, which its latest response of that name has.
    """

    messages: list[dict[str, Any]]
    shown: dict[str, Any]
    alias: str | None = None


class ResponseStore:
    """By owner and id. An owner is who an API key stands for; without keys all are one.

    Where the bounds are reached, the owner that has most gives up its oldest: nobody's
    responses go because of another who keeps more.
    """

    def __init__(self) -> None:
        # Of an owner, what has not been asked for the longest comes first.
        self._owners: dict[str, OrderedDict[str, bytes]] = {}
        self._aliases: dict[tuple[str, str], str] = {}  # of owner and alias, the id
        self._items: dict[tuple[str, str], str] = {}  # of owner and item, the response's id

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(map(_size, self._owners.values()))

    def keep(self, owner: str, response: KeptResponse) -> None:
        """Its id and those of its items must be new. One beyond all bounds is not kept."""
        text = _text(vars(response))
        if len(text) > MAX_BYTES:
            return
        name = response.shown["id"]
        self._owners.setdefault(owner, OrderedDict())[name] = text
        self._items |= {(owner, item["id"]): name for item in response.shown["output"]}
        if response.alias is not None:
            self._aliases[owner, response.alias] = name
        while (many := len(self) > MAX_RESPONSES) or self.size > MAX_BYTES:
            most = max(
                self._owners, key=lambda owner: (len if many else _size)(self._owners[owner])
            )
            self.drop(most, next(iter(self._owners[most])))

    def get(self, owner: str, name: str) -> KeptResponse | None:
        """The response of that id, else of that alias."""
        responses = self._owners.get(owner, OrderedDict())
        if name not in responses:
            name = self._aliases.get((owner, name), "")
        if name not in responses:
            return None
        responses.move_to_end(name)
        return KeptResponse(**_value(responses[name]))

    def drop(self, owner: str, name: str) -> None:
        """Forget the response of an id, which is there."""
        gone = KeptResponse(**_value(self._owners[owner].pop(name)))
        for item in gone.shown["output"]:
            del self._items[owner, item["id"]]
        if self._aliases.get((owner, gone.alias or "")) == name:
            del self._aliases[owner, gone.alias or ""]

    def item(self, owner: str, name: str) -> dict[str, Any] | None:
        """An item of the output of one of the owner's responses."""
        response = self.get(owner, self._items.get((owner, name), ""))
        outputs = [] if response is None else response.shown["output"]
        return next((item for item in outputs if item["id"] == name), None)


def _size(responses: OrderedDict[str, bytes]) -> int:
    return sum(map(len, responses.values()))


def _text(value: Any) -> bytes:
    """JSON; a client's text may have lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _value(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
