"""The engine process: model, engine thread and metrics. It ends when the connection closes."""

from __future__ import annotations

import socket
import sys
import threading
import traceback

from paceline.core.children import exit_now, ignore_signals
from paceline.errors import debugging, error_line
from paceline.server import wire
from paceline.server.loop import EngineLoop, Link


def main() -> None:
    """Run the engine process; ``sys.argv[1]`` is the file descriptor of the connection."""
    ignore_signals()  # the parent handles them: it drains, then closes the connection
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = wire.read_message(connection)
    if first is None:
        return
    message = wire.REQUESTS.decode(first)
    assert isinstance(message, wire.LoadModel)
    link = Link(connection, lambda: exit_now(0))
    # Read while the model loads, so that the end of the parent ends this process.
    threading.Thread(target=link.read, name="paceline-link", daemon=True).start()
    loop = link.loop = _load(message, link)
    link.send(wire.Hello(wire.Facts.of(loop.llm)))
    loop.start()
    loop.join()
    exit_now(0 if loop.lost is None else 1)


def _load(message: wire.LoadModel, link: Link) -> EngineLoop:
    """Load the model. On failure, report it to the parent and end the process."""
    from paceline.server.local import load_llm
    from paceline.server.run import set_up_logging

    config = message.config
    set_up_logging(config.log_level)
    try:
        return EngineLoop(load_llm(config), link.send, config.alias_of)
    except Exception as error:
        if debugging():
            traceback.print_exc()
        link.send(wire.Lost(error_line(error).encode("utf-8", "replace").decode("utf-8")))
        exit_now(1)
