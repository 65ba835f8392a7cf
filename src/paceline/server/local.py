"""The engine on a thread of the HTTP process (``--single-process``)."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from paceline.core.libraries import quiet_libraries, set_threads
from paceline.server.loop import EngineLoop, Link
from paceline.server.service import Service
from paceline.server.wire import Facts
from paceline.settings import explicit

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.server.config import ServeConfig


def load_llm(settings: ServeConfig) -> LLM:
    """Load the model with the settings of a server. Raises what ``LLM`` raises."""
    quiet_libraries()
    set_threads(settings.threads)
    from paceline import LLM

    more: dict[str, Any] = {"config": settings.config, "lora": settings.adapters}
    return LLM(settings.model, settings.drafts, **more, **explicit(vars(settings), "LLM"))


_JOIN_SECONDS = 10.0  # how long ``close`` waits for the thread that reads the connection


class EngineThread:
    """An engine on a thread of this process; messages cross a socket pair as between processes."""

    def __init__(self, llm: LLM, alias_of: str | None = None) -> None:
        self.llm, self.facts = llm, Facts.of(llm)
        self._connection, self._engine_end = socket.socketpair()
        link = Link(self._engine_end, self._engine_end.close)
        self.loop = link.loop = EngineLoop(llm, link.send, alias_of)
        self._reader = threading.Thread(target=link.read, name="paceline-link", daemon=True)

    def start(self) -> socket.socket:
        self._reader.start()
        self.loop.start()
        return self._connection

    def exit_reason(self) -> str:
        return "has ended"

    def close(self) -> None:
        """End the engine, whether or not it was started."""
        self._connection.close()  # which ends the reader
        if self._reader.is_alive():
            self._reader.join(_JOIN_SECONDS)
        self.loop.stop()
        self._engine_end.close()


def local_service(llm: LLM, config: ServeConfig) -> Service:
    """The service of a loaded model, with the names and limits of ``config``."""
    return Service(EngineThread(llm, config.alias_of), llm.tokenizer, config)
