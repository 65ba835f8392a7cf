"""The engine in the process that speaks HTTP, on a thread of its own (``--single-process``)."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.server.loop import EngineLoop, Link
from paceline.server.service import Service
from paceline.server.wire import Facts

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.server.config import ServeConfig


def load_llm(settings: ServeConfig) -> LLM:
    """Raises what ``LLM`` does."""
    names = settings.model, settings.drafts, settings.config
    return options.load_llm(settings, *names, lora=settings.adapters)


_END_SECONDS = 10.0  # for the reading thread to end


class EngineThread:
    """The engine on a thread of this process, with the same messages as between two processes."""

    def __init__(self, llm: LLM, alias_of: str | None = None) -> None:
        self.llm, self.facts = llm, Facts.of(llm)
        self._connection, self._theirs = socket.socketpair()
        link = Link(self._theirs, self._theirs.close)
        self.loop = link.loop = EngineLoop(llm, link.send, alias_of)
        self._reading = threading.Thread(target=link.read, name="paceline-link", daemon=True)

    def start(self) -> socket.socket:
        self._reading.start()
        self.loop.start()
        return self._connection

    def ended(self) -> str:
        return "has ended"

    def close(self) -> None:
        """Also for one that was never started."""
        self._connection.close()  # which ends the reading
        if self._reading.is_alive():
            self._reading.join(_END_SECONDS)
        self.loop.stop()
        self._theirs.close()


def local_service(llm: LLM, config: ServeConfig) -> Service:
    """A service over a loaded model, with the names and limits of ``config``."""
    return Service(EngineThread(llm, config.alias_of), llm.tokenizer, config)
