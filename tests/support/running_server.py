"""A running server over the embedded pair, for clients that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from paceline.server.app import create_app
from paceline.server.child import Link
from paceline.server.client import Limits
from paceline.server.loop import EngineLoop
from paceline.server.process import RemoteEngine
from paceline.server.requestlog import Exchange
from paceline.server.security import Security
from paceline.server.service import Service
from paceline.server.wire import Facts

if TYPE_CHECKING:
    from paceline import LLM

MODEL = "paceline/tiny"


@dataclass
class Running:
    """A server in this process; ``url`` has no slash at its end."""

    url: str
    service: Service

    @property
    def free_blocks(self) -> int:
        return self.service.client.llm.engine.cache.pool.available


class SocketEngine(RemoteEngine):
    """What two processes say to each other, said by two threads of this one: a test can look into
    the engine, and everything that handlers see has crossed the socket."""

    def __init__(self, llm: LLM, limits: Limits | None = None) -> None:
        self.connection, theirs = socket.socketpair()
        process: Any = self  # ``connection``, ``ended`` and ``close`` are below
        super().__init__(process, Facts.of(llm), limits)
        self.llm = llm
        self.link = Link(theirs, theirs.close)
        self.link.loop = self.loop = EngineLoop(llm, self.link.send)
        self._reader = threading.Thread(target=self.link.read, daemon=True)

    async def start(self) -> None:
        self._reader.start()
        self.loop.start()
        await super().start()

    def ended(self) -> str:
        return "has ended"

    def close(self) -> None:
        self.loop.stop()
        self.connection.close()
        self._reader.join(10)


def socket_service(llm: LLM, model: str, limits: Limits | None = None, **more: Any) -> Service:
    """Like ``local_service``, over a socket."""
    return Service(SocketEngine(llm, limits), llm.tokenizer, model, **more)


def serve(
    service: Service,
    security: Security | None = None,
    listener: socket.socket | None = None,
    ended: Callable[[Exchange], None] | None = None,
) -> Iterator[Running]:
    """Run uvicorn, on a free port if there is no listener, until the caller goes on."""
    listener = listener or socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        create_app(service, security, ended), log_level="warning", lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
