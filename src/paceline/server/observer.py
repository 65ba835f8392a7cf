"""Who watches the engine's thread; a watcher that fails must not stop what it watches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.core.batch import Commit
    from paceline.llm import LLM
    from paceline.request.request import Request

log = logging.getLogger("paceline.server")


class Observer(Protocol):
    """Sees what happens on the engine thread; see metrics.py."""

    def queued(self, requests: Sequence[Request]) -> None: ...

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None: ...

    def finished(self, request: Request, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled", "deadline" or "error"."""
        ...


class SilentObserver:
    def queued(self, requests: Sequence[Request]) -> None:
        pass

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        pass

    def finished(self, request: Request, outcome: str) -> None:
        pass


class Guarded:
    """An observer whose failures are logged, each kind once, and go no further."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._failed: set[str] = set()

    def queued(self, requests: Sequence[Request]) -> None:
        self._tell("queued", requests)

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        self._tell("stepped", llm, advanced)

    def finished(self, request: Request, outcome: str) -> None:
        self._tell("finished", request, outcome)

    def _tell(self, what: str, *arguments: Any) -> None:
        try:
            getattr(self._observer, what)(*arguments)
        except Exception as error:
            if what not in self._failed:  # every step would fill the log
                self._failed.add(what)
                name = type(self._observer).__name__
                log.exception("%s.%s failed; decoding goes on", name, what, exc_info=error)
