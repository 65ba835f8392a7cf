"""The life of a server process: bind, run, drain.

first SIGTERM or SIGINT   unready, new requests get 503, running ones finish, exit 0
drain_seconds later       what still runs is ended with an error, exit 0
a second signal           the process ends at once, exit 128 + signal
the engine is lost        clients are told, one line, exit 1: a supervisor starts another
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from paceline.errors import EngineLostError, PacelineError
from paceline.server.app import create_app
from paceline.server.client import EngineClient
from paceline.server.requestlog import Exchange
from paceline.server.security import Keys, is_loopback
from paceline.server.service import Service
from paceline.server.wire import Facts

if TYPE_CHECKING:
    from paceline.server.config import ServeConfig

log = logging.getLogger("paceline.server")

STALL_SECONDS = 60
_CLOSING_SECONDS = 5  # for clients to read complete answers
_OTHER_FILES = 64  # that are open beside the connections


class AddressError(PacelineError):
    """The server cannot listen at its address."""


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address, for ``run``: a taken port shows at once. Raises AddressError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(
            f"host {host!r} is no address ({error.strerror}); use 127.0.0.1, 0.0.0.0 or a name"
        ) from None
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Cuts off clients that read nothing for so long; accepted connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_SECONDS * 1000)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise AddressError(_refusal(error, host, port)) from None
    return listener


def _refusal(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken; stop what listens there, or choose another --port "
            "(0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose a --port from 1024"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; choose another --host"
    return f"cannot listen on {host}, port {port}: {error.strerror}"


def url_of(listener: socket.socket, host: str) -> str:
    """The URL for clients on this machine."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def set_up_logging(level: str) -> None:
    """Paceline's log at ``level``, other libraries' warnings, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("paceline").setLevel(level.upper())


def run(
    service: Service,
    keys: Keys,
    listener: socket.socket,
    ended: Callable[[Exchange], None] | None = None,
) -> None:
    """Serve until a signal, and drain. ``ended`` is called after each request. Raises AddressError,
    and EngineLostError if the engine stopped."""
    config = service.config
    most_connections = raise_file_limit()
    try:
        listener.listen(2048)
    except OSError as error:  # taken while the model was loading
        raise AddressError(_refusal(error, config.host, config.port)) from None
    uvicorn_config = uvicorn.Config(
        create_app(service, keys, ended, local=not keys and is_loopback(config.host)),
        log_config=None,
        access_log=False,  # see requestlog.py
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    warn_of_backend(service.facts)
    announcement = describe(service.facts, config, keys, url_of(listener, config.host))
    server = DrainingServer(uvicorn_config, service.client, config.drain_seconds, announcement)
    server.run([listener])
    if service.client.failure is not None:
        raise EngineLostError(
            f"the engine cannot go on: {service.client.failure}; the server has ended, start it "
            "again"
        )


def describe(facts: Facts, config: ServeConfig, keys: Keys, url: str) -> str:
    """The line printed at start."""
    drafters = ", ".join(facts.drafters) or "none"
    guard = f"{len(keys)} API keys" if keys else "no API key"
    return (
        f"serving {config.name} at {url} (drafters: {drafters}; {facts.dtype} on {facts.device}; "
        f"backend {facts.backend}; {guard})"
    )


def warn_of_backend(facts: Facts) -> None:
    """Log how to get the native kernels where they are not used on a CPU."""
    if facts.device != "cpu" or facts.backend.startswith("native"):
        return
    log.warning(
        "the backend is %s: 0.2 to 0.6 times as fast as the native kernels, and texts may differ "
        "in near ties. If the kernels are missing: install g++ and let PACELINE_CACHE be a folder "
        "that the server may write, or ship them (docs/guides/deploy.md). Other reasons: "
        "docs/troubleshooting.md",
        facts.backend,
    )


def raise_file_limit() -> int | None:
    """Allow as many connections as the system permits. Returns how many; None: no limit is known.

    Further ones get 503: out of files, the system would cut them off, and a running request fail.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return None
    most = max(1, files - _OTHER_FILES)
    if most < 1000:
        log.warning(
            "the system allows %d open files: of more than %d connections at once some get 503; "
            "raise it with ulimit -n",
            files,
            most,
        )
    return most


class DrainingServer(uvicorn.Server):
    """Keeps listening while it drains, so that new requests get 503."""

    def __init__(
        self, config: uvicorn.Config, loop: EngineClient, drain_seconds: float, announcement: str
    ) -> None:
        super().__init__(config)
        self._loop, self._drain_seconds = loop, drain_seconds
        self._announcement = announcement
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, does not raise the signal again: a drained server exits with 0."""
        if self._drain_until is not None:
            log.warning("a second signal: ending at once")
            os._exit(128 + sig)
        self._loop.drain()
        self._drain_until = time.monotonic() + self._drain_seconds
        name = signal.Signals(sig).name
        log.info("%s: no new requests; running ones have %g s", name, self._drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._loop.failure is not None and not self.should_exit:
            # All clients have been told; a supervisor can start another process.
            self.should_exit = True
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() > self._drain_until
            if late and not self._loop.idle:
                log.warning("drain_seconds are over: what still runs is ended")
                await self._loop.stop()
            self.should_exit = late or self._loop.idle
        return await super().on_tick(counter)
