"""The engine's process: model, engine thread and metrics. It ends when the connection closes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from paceline.server import wire
from paceline.server.loop import EngineLoop, Link


def _end(code: int) -> NoReturn:
    """End at once: threads may be in the middle of a step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(descriptor: int) -> None:
    """Run the process. ``descriptor``: the connection's."""
    for heard in (signal.SIGINT, signal.SIGTERM):
        signal.signal(heard, signal.SIG_IGN)  # the parent drains, then closes the connection
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    connection = socket.socket(fileno=descriptor)
    first = wire.read_message(connection)
    if first is None:
        return
    message = wire.REQUESTS.decode(first)
    assert isinstance(message, wire.LoadModel)
    link = Link(connection, lambda: _end(0))
    # Before loading, so that the end of the parent is noticed.
    threading.Thread(target=link.read, name="paceline-link", daemon=True).start()
    loop = link.loop = _load(message, link)
    link.send(wire.Hello(wire.Facts.of(loop.llm)))
    loop.start()
    loop.join()
    _end(0 if loop.lost is None else 1)


def _load(message: wire.LoadModel, link: Link) -> EngineLoop:
    """Load the model; ends the process on failure."""
    from paceline.cli.output import debugging, reason_of
    from paceline.server.local import load_llm
    from paceline.server.run import set_up_logging

    config = message.config
    set_up_logging(config.log_level)
    try:
        return EngineLoop(load_llm(config), link.send, config.alias_of)
    except Exception as error:
        if debugging():
            traceback.print_exc()
        link.send(wire.Lost(reason_of(error).encode("utf-8", "replace").decode("utf-8")))
        _end(1)
