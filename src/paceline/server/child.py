"""What runs in the engine's process: the model, the thread that decodes, and the metrics.

Three threads: one reads the socket, one prepares requests (endpoint.py), one decodes (loop.py) and
writes to the socket. Without its parent this process has no purpose: when the connection is closed,
it ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec

from paceline.errors import ConfigError, PacelineError
from paceline.server.config import ServeConfig
from paceline.server.endpoint import EngineEndpoint
from paceline.server.wire import (
    REQUESTS,
    Ended,
    Facts,
    Failed,
    Fault,
    Hello,
    LoadModel,
    WireMessage,
    framed,
    read_message,
)

log = logging.getLogger("paceline.server")


def _end(code: int) -> NoReturn:
    """Now: threads may be in the middle of a step, and nothing here outlives the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Link:
    """This end of the connection. Any thread may ``send``; messages stay whole.

    ``end`` is called when the other end is closed.
    """

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        self._connection, self._end = connection, end
        self._writing = threading.Lock()
        self.endpoint: EngineEndpoint | None = None

    def send(self, message: WireMessage) -> None:
        """Waits while the other process does not read, and so the engine does, too."""
        data = framed(message)
        try:
            with self._writing:
                self._connection.sendall(data)
        except OSError:
            self._end()

    def receive(self) -> bytes | None:
        """One message; None once the other end is closed."""
        return read_message(self._connection)

    def read(self) -> None:
        """Until the other process has gone."""
        while (body := self.receive()) is not None:
            assert self.endpoint is not None, "nothing is asked before the hello"
            try:
                message = REQUESTS.decode(body)
            except msgspec.MsgspecError as error:
                self._refuse(body, error)
                continue
            self.endpoint.handle(message)
        self._end()

    def _refuse(self, body: bytes, error: msgspec.MsgspecError) -> None:
        """A request that is none here costs nobody else anything."""
        log.warning("a request could not be read: %s", error)
        fields = msgspec.msgpack.decode(body)
        if isinstance(fields, list) and fields[:1] == ["Submit"]:
            reason = ConfigError(f"the request cannot be read: {error}")
            self.send(Ended(int(fields[1]), Fault.of(reason)))


def main(descriptor: int) -> None:
    """The life of the process. ``descriptor`` is that of the connection."""
    for heard in (signal.SIGINT, signal.SIGTERM):
        signal.signal(heard, signal.SIG_IGN)  # the parent drains, and then closes the connection
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    link = Link(socket.socket(fileno=descriptor), lambda: _end(0))
    first = link.receive()
    if first is None:
        return
    load = REQUESTS.decode(first)
    assert isinstance(load, LoadModel)
    # Before anything is loaded, so that a parent that ends meanwhile is noticed.
    threading.Thread(target=link.read, name="paceline-link", daemon=True).start()
    endpoint = _open(load.config, link)
    link.endpoint = endpoint
    link.send(Hello(Facts.of(endpoint.llm)))
    endpoint.loop.start()
    endpoint.loop.join()
    _end(0 if endpoint.loop.lost is None else 1)


def _open(config: ServeConfig, link: Link) -> EngineEndpoint:
    """The endpoint of the loaded model; ends the process if it cannot be loaded."""
    from paceline.cli.output import debugging
    from paceline.server.loading import load_llm
    from paceline.server.run import set_up_logging

    set_up_logging(config.log_level)
    try:
        return EngineEndpoint(load_llm(config), config.max_queue, link.send, config.alias_of)
    except Exception as error:
        if debugging():
            traceback.print_exc()
        expected = isinstance(error, PacelineError)
        fault = Fault.of(error)
        if not expected:
            reason = f"unexpected {type(error).__name__}: {error}"
            fault = Fault("PacelineError", f"{reason}; run again with --debug for the traceback")
        link.send(Failed(fault, expected))
        _end(1)
