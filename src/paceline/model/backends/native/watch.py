"""Calls of the kernels as a profile sees them: torch's own tools know nothing of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class NativeWork:
    """What one call has to do. ``reads``: of every packed matrix what tells it from others, its
    elements, its bytes as it lies in memory, and the rows that are multiplied by it.

    ``cache_bytes`` are keys and values that attention reads, ``attention_flops`` what it does.
    """

    name: str
    reads: tuple[tuple[object, int, int, int], ...]
    cache_bytes: int = 0
    attention_flops: int = 0


Watcher = Callable[[NativeWork], AbstractContextManager[object]]
_WATCHERS: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is told of every call, which then happens within what it returns."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


def watched(call: Callable[[], int], work: Callable[[], NativeWork]) -> int:
    """The result of ``call``; ``work`` is only asked for where somebody watches."""
    if not _WATCHERS:
        return call()
    found = work()
    with ExitStack() as around:
        for watcher in _WATCHERS:
            around.enter_context(watcher(found))
        return call()
