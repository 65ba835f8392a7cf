"""The life of a server process: bind, run, drain.

first SIGTERM or SIGINT   not ready; new requests get 503, running ones finish; exit status 0
drain_seconds later       requests that still run end with an error; exit status 0
a second signal           the process ends at once; exit status 128 + signal
the engine is lost        all clients get an error; one line on stderr; exit status 1, so that a
                          supervisor can restart the server"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from types import FrameType

import uvicorn

from paceline.errors import EngineLostError, PacelineError
from paceline.server.app import create_app
from paceline.server.client import EngineClient
from paceline.server.config import ServeConfig
from paceline.server.security import Keys, is_loopback
from paceline.server.service import Service
from paceline.server.wire import Facts

log = logging.getLogger("paceline.server")

STALL_SECONDS = 60  # a client that reads nothing for so long is disconnected
_SHUTDOWN_SECONDS = 5  # how long clients may still read their answers
_OTHER_FILES = 64  # files kept free for other purposes than connections


class AddressError(PacelineError):
    """The server cannot listen at its address."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address, for ``run``, before the model is loaded: if the port is taken
    the user learns it at once. Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted connections inherit this option.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_SECONDS * 1000)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> AddressError:
    advice = "choose another --host or --port"
    return AddressError(f"cannot listen on {host}, port {port}: {error.strerror}; {advice}")


def url_of(listener: socket.socket, host: str) -> str:
    """The URL of the server for clients on this machine."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def set_up_logging(level: str) -> None:
    """Log to stderr: Paceline's messages from ``level`` on, and warnings of other libraries."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("paceline").setLevel(level.upper())


def run(service: Service, keys: Keys, listener: socket.socket) -> None:
    """Serve until a signal comes, then drain. Raises AddressError, and EngineLostError if the
    engine has failed."""
    config = service.config
    max_connections = raise_file_limit()
    try:
        listener.listen(2048)
    except OSError as error:  # taken while the model was loading
        raise _cannot_listen(config.host, config.port, error) from None
    uvicorn_config = uvicorn.Config(
        create_app(service, keys, local=not keys and is_loopback(config.host)),
        log_config=None,
        access_log=False,  # requestlog.py has its own
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    announcement = describe(service.facts, config, keys, url_of(listener, config.host))
    server = DrainingServer(uvicorn_config, service.client, config.drain_seconds, announcement)
    server.run([listener])
    if service.client.failure is not None:
        raise EngineLostError(
            f"the engine has failed: {service.client.failure}; the server has ended, start it again"
        )


def describe(facts: Facts, config: ServeConfig, keys: Keys, url: str) -> str:
    """The line that is printed when the server is ready."""
    drafters = ", ".join(facts.drafters) or "none"
    access = f"{len(keys)} API keys" if keys else "no API key"
    return (
        f"serving {config.name} at {url} (drafters: {drafters}; {facts.dtype} on {facts.device}; "
        f"backend {facts.backend}; {access})"
    )


def raise_file_limit() -> int | None:
    """Raise the limit of open files to the hard limit. Returns how many connections that allows, or
    None if there is no limit. Connections beyond it get 503. If the process ran out of files
    instead, the system would drop connections, and running requests might fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if files == resource.RLIM_INFINITY else max(1, files - _OTHER_FILES)


class DrainingServer(uvicorn.Server):
    """A uvicorn server that keeps listening while it drains, so that new requests get 503."""

    def __init__(
        self, config: uvicorn.Config, client: EngineClient, drain_seconds: float, announcement: str
    ) -> None:
        super().__init__(config)
        self._client, self._drain_seconds = client, drain_seconds
        self._announcement = announcement
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain. uvicorn would raise the signal again; a drained server exits with 0."""
        if self._drain_until is not None:
            log.warning("received a second signal: ending at once")
            os._exit(128 + sig)
        self._client.drain()
        self._drain_until = time.monotonic() + self._drain_seconds
        name = signal.Signals(sig).name
        log.info(
            "received %s: refusing new requests; running ones have %g s to finish",
            name,
            self._drain_seconds,
        )

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to exit; uvicorn calls this ten times a second."""
        if self._client.failure is not None:  # all clients have been notified
            self.should_exit = True
        if self._drain_until is not None and not self.should_exit:
            expired = time.monotonic() > self._drain_until
            if expired and not self._client.idle:
                log.warning("drain_seconds have passed: ending the requests that still run")
                await self._client.stop()
            self.should_exit = expired or self._client.idle
        return await super().on_tick(counter)
