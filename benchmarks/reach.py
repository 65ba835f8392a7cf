"""Finds objects inside an engine by their type, so that a benchmark can wrap them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def reachable(root: Any, kind: type[T]) -> Iterator[tuple[Any, str, T]]:
    """Yield (owner, attribute, found) for every attribute of type `kind` that is reachable.

    Walks attributes of Paceline's own objects, and the lists and dictionaries among them. An
    object held by several owners is yielded once for each of them.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, (list, tuple)):
            waiting.extend(owner)
        elif isinstance(owner, dict):
            waiting.extend(owner.values())
        elif type(owner).__module__.startswith("paceline."):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, kind):
                    yield owner, name, value
                waiting.append(value)
