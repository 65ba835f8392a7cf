"""Progress of long work, reported where it is done and shown by a listener.

Code that reads a model, tokenises a corpus or trains opens a stage; a command listens and shows it;
without a listener it costs nothing. Stages nest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from paceline.core.bound import bound


class Stage:
    """A piece of work under way; this one is not shown."""

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        """``steps`` more of ``total`` are done; ``note``: what comes next."""

    def resize(self, total: float) -> None:
        """The amount of work became known, or changed."""


class Listener:
    """Shows stages; this one shows none."""

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        return Stage()

    def end(self, stage: Stage) -> None:
        pass

    def info(self, line: str) -> None:
        """A line that stays, between stages."""


_NOBODY = Listener()
_listener: ContextVar[Listener] = ContextVar("paceline_stages", default=_NOBODY)


@contextmanager
def stage(what: str, total: float | None = None, unit: str = "") -> Iterator[Stage]:
    """Begin ``what``, such as "tokenising chat.jsonl". ``total``: amount of work, None while
    unknown; ``unit`` follows the numbers, "B" is shown as kB, MB or GB."""
    listener = _listener.get()
    begun = listener.begin(what, total, unit)
    try:
        yield begun
    finally:
        listener.end(begun)


def info(line: str) -> None:
    """A line that stays on the screen or in the log."""
    _listener.get().info(line)


def warn(line: str) -> None:
    """As info; without a listener, to the log "paceline"."""
    if is_heard():
        info(line)
    else:
        logging.getLogger("paceline").warning(line)


def is_heard() -> bool:
    """Whether there is a listener."""
    return _listener.get() is not _NOBODY


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Stages of this block are shown by ``listener``."""
    return bound(_listener, listener)
