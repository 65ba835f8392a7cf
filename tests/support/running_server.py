"""A running server over the embedded pair, for clients that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from paceline.server.app import create_app
from paceline.server.config import ServeConfig
from paceline.server.local import local_service
from paceline.server.security import Keys
from paceline.server.service import Service

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
        return self.service.client.engine.llm.engine.cache.pool.available


def service_of(llm: LLM, name: str = MODEL, **settings: Any) -> Service:
    """A loaded model under a name, with settings of a server. Tests can look into the engine, and
    everything that handlers see has crossed the socket."""
    return local_service(llm, ServeConfig(model=name, **settings))


def serve(
    service: Service,
    keys: Keys | None = None,
    listener: socket.socket | None = None,
    local: bool = False,
) -> Iterator[Running]:
    """Run uvicorn, on a free port if there is no listener, until the caller goes on."""
    listener = listener or socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(create_app(service, keys, local), log_level="warning", lifespan="on")
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
