"""A running server over the embedded pair, for clients that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from paceline.server.app import create_app
from paceline.server.security import Security
from paceline.server.service import Service

MODEL = "paceline/tiny"


@dataclass
class Running:
    """A server in this process; ``url`` has no slash at its end."""

    url: str
    service: Service

    @property
    def free_blocks(self) -> int:
        return self.service.loop.llm.engine.cache.pool.available


def serve(service: Service, security: Security | None = None) -> Iterator[Running]:
    """Run uvicorn on a free port until the caller goes on."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(service, security), log_level="warning", lifespan="on")
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
