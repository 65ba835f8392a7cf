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
from typing import Protocol


class Stage(Protocol):
    """A piece of work that is under way."""

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        """So many more of the stage's ``total`` are done; ``note`` says what comes next."""
        ...

    def resize(self, total: float) -> None:
        """The amount of work became known, or changed."""
        ...


class Listener(Protocol):
    """Shows stages."""

    def begin(self, what: str, total: float | None, unit: str) -> Stage: ...

    def end(self, stage: Stage) -> None: ...

    def info(self, line: str) -> None:
        """A line that stays, between stages."""
        ...


class _Silence:
    def advance(self, steps: float = 1, note: str | None = None) -> None:
        pass

    def resize(self, total: float) -> None:
        pass


_SILENCE = _Silence()
_listener: ContextVar[Listener | None] = ContextVar("paceline_stages", default=None)


@contextmanager
def stage(what: str, total: float | None = None, unit: str = "") -> Iterator[Stage]:
    """Say that ``what`` begins, in words such as "tokenising chat.jsonl".

    ``total`` is the amount of work, None while unknown; ``unit`` is written behind the numbers,
    "B" is shown as kB, MB or GB.
    """
    listener = _listener.get()
    if listener is None:
        yield _SILENCE
        return
    begun = listener.begin(what, total, unit)
    try:
        yield begun
    finally:
        listener.end(begun)


def info(line: str) -> None:
    """A line that stays on the screen or in the log, such as a measurement on the way."""
    listener = _listener.get()
    if listener is not None:
        listener.info(line)


def warn(line: str) -> None:
    """As say; without a listener, as from Python, it goes to the log "paceline"."""
    if is_heard():
        info(line)
    else:
        logging.getLogger("paceline").warning(line)


def is_heard() -> bool:
    """Whether somebody listens to the stages that are begun here."""
    return _listener.get() is not None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Stages begun in this block are shown by ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
