"""What long work is doing right now, said where it is done and shown by whoever listens.

Reading a model, tokenising a corpus or training a head happens far below the command that was
asked for it. That code opens a stage; a command listens and shows it; without a listener it costs
nothing. Stages nest: the innermost is what is happening.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stage:
    """A piece of work that is under way; this one is shown nowhere."""

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        """So many more of the stage's ``total`` are done; ``note`` says what comes next."""

    def resize(self, total: float) -> None:
        """The amount of work became known, or changed."""


class Listener:
    """Shows stages; this one is nobody, and shows none."""

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
    """Say that ``what`` begins, in words such as "tokenising chat.jsonl". ``total`` is the amount
    of work, None while unknown; ``unit`` is written behind the numbers, "B" is shown as kB, MB or
    GB."""
    listener = _listener.get()
    begun = listener.begin(what, total, unit)
    try:
        yield begun
    finally:
        listener.end(begun)


def info(line: str) -> None:
    """A line that stays on the screen or in the log, such as a measurement on the way."""
    _listener.get().info(line)


def warn(line: str) -> None:
    """As info; without a listener, as from Python, it goes to the log "paceline"."""
    if is_heard():
        info(line)
    else:
        logging.getLogger("paceline").warning(line)


def is_heard() -> bool:
    """Whether somebody listens to the stages that are begun here."""
    return _listener.get() is not _NOBODY


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Stages begun in this block are shown by ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
