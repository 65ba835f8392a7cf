"""Responses that later requests may go on from: in memory, the latest, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1024
MAX_CHARACTERS = 64 * 2**20


@dataclass(frozen=True)
class KeptResponse:
    """``messages`` lead to it, ``answer`` it is as a message, and ``shown`` as it was told."""

    messages: tuple[dict[str, Any], ...]
    shown: dict[str, Any]

    @property
    def characters(self) -> int:
        """About what it takes."""
        texts = sum(len(str(message.get("content") or "")) for message in self.messages)
        return texts + sum(len(str(item)) for item in self.shown["output"])


class ResponseStore:
    """By id; what has not been asked for the longest goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: KeptResponse) -> None:
        self._kept[response.shown["id"]] = response
        self._characters += response.characters
        while self._kept and (len(self._kept) > MAX_RESPONSES or self._characters > MAX_CHARACTERS):
            self.drop(next(iter(self._kept)))

    def get(self, name: str) -> KeptResponse | None:
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def drop(self, name: str) -> bool:
        """Whether it was there."""
        found = self._kept.pop(name, None)
        if found is not None:
            self._characters -= found.characters
        return found is not None

    def item(self, name: str) -> dict[str, Any] | None:
        """An item of the output of one of them, the latest first."""
        for response in reversed(self._kept.values()):
            for item in response.shown["output"]:
                if item["id"] == name:
                    return dict(item)
        return None
