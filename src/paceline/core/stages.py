"""Progress reports of long work.

Code that loads a model, tokenises a corpus or trains opens a stage. A command that wants to show
progress installs a listener; without one, stages cost nothing. Stages nest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from paceline.core.bound import bound


class Stage:
    """A piece of work in progress. This base class shows nothing."""

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        """Report that ``steps`` more of ``total`` are done. ``note``: what is done next."""


class Listener:
    """Shows stages. This base class shows nothing."""

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        return Stage()

    def end(self, stage: Stage) -> None:
        pass

    def info(self, line: str) -> None:
        """Show a line permanently."""


_NO_LISTENER = Listener()
_listener: ContextVar[Listener] = ContextVar("paceline_stages", default=_NO_LISTENER)


@contextmanager
def stage(what: str, total: float | None = None, unit: str = "") -> Iterator[Stage]:
    """Open a stage for the block. ``what`` names the work, as in "tokenising chat.jsonl".
    ``total``: amount of work, None while unknown. ``unit`` follows the numbers; "B" is shown as kB,
    MB or GB."""
    listener = _listener.get()
    opened = listener.begin(what, total, unit)
    try:
        yield opened
    finally:
        listener.end(opened)


def info(line: str) -> None:
    """Show a line permanently on the screen or in the log."""
    _listener.get().info(line)


def warn(line: str) -> None:
    """As ``info``; without a listener the line goes to the log "paceline"."""
    if is_heard():
        info(line)
    else:
        logging.getLogger("paceline").warning(line)


def is_heard() -> bool:
    """Whether there is a listener."""
    return _listener.get() is not _NO_LISTENER


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Show the stages of the block by ``listener``."""
    return bound(_listener, listener)
