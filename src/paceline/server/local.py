"""The process that runs the engine: a thread beside HTTP (``--single-process``), or a process of
its own (``main``), which ends when the connection closes."""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.children import exit_now, ignore_signals
from paceline.core.libraries import quiet_libraries, set_threads
from paceline.errors import debugging, error_line
from paceline.server import wire
from paceline.server.config import ServeConfig
from paceline.server.loop import EngineLoop, Link
from paceline.server.run import set_up_logging
from paceline.server.service import Service
from paceline.settings import explicit

if TYPE_CHECKING:
    from paceline.llm import LLM


def load_llm(settings: ServeConfig) -> LLM:
    """Load the model with the settings of a server. Raises what ``LLM`` raises."""
    quiet_libraries()
    set_threads(settings.threads)
    from paceline import LLM

    more: dict[str, Any] = {"config": settings.config, "lora": settings.adapters}
    return LLM(settings.model, settings.drafts, **more, **explicit(vars(settings), "LLM"))


def main() -> None:
    """Run the engine process; ``sys.argv[1]`` is the file descriptor of the connection."""
    ignore_signals()  # the parent handles them: it drains, then closes the connection
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = wire.read_message(connection)
    if first is None:
        return
    config = msgspec.msgpack.decode(first, type=ServeConfig)
    link = Link(connection, lambda: exit_now(0))
    # Read while the model loads, so that the end of the parent ends this process.
    threading.Thread(target=link.read, name="paceline-link", daemon=True).start()
    set_up_logging(config.log_level)
    try:
        loop = link.loop = EngineLoop(load_llm(config), link.send)
    except Exception as error:
        if debugging():
            traceback.print_exc()
        link.send(wire.Lost(error_line(error).encode("utf-8", "replace").decode("utf-8")))
        exit_now(1)
    link.send(wire.Hello(wire.Facts.of(loop.llm)))
    loop.start()
    loop.join()
    exit_now(0 if loop.lost is None else 1)


_JOIN_SECONDS = 10.0  # how long ``close`` waits for the thread that reads the connection


class EngineThread:
    """An engine on a thread of this process; messages cross a socket pair as between processes."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.facts = llm, wire.Facts.of(llm)
        self._connection, self._engine_end = socket.socketpair()
        link = Link(self._engine_end, self._engine_end.close)
        self.loop = link.loop = EngineLoop(llm, link.send)
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
    return Service(EngineThread(llm), llm.tokenizer, config)
