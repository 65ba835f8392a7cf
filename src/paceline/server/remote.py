"""The engine in a process of its own, seen from the process that speaks HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.server.client import EngineClient, Limits
from paceline.server.failures import BusyError, GoneError
from paceline.server.wire import REPLIES, Frames, WireMessage, framed

if TYPE_CHECKING:
    from paceline.server.process import EngineProcess
    from paceline.server.records import Facts

# Bytes that an engine process may leave unread before new requests are refused.
MAX_UNSENT = 64 * 2**20


class RemoteEngine(EngineClient):
    """Messages go through the socket of an ``EngineProcess`` that has said hello."""

    def __init__(self, process: EngineProcess, facts: Facts, limits: Limits | None = None) -> None:
        super().__init__(facts, limits)
        self._process = process
        self._transport: asyncio.WriteTransport | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(
            lambda: _Link(self), sock=self._process.connection
        )
        self._transport, self._started = transport, True

    def _post(self, message: WireMessage) -> None:
        if self._transport is None or self._transport.is_closing():
            raise GoneError
        try:
            data = framed(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"the request cannot be read: {error}") from None
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            raise BusyError("the engine does not take requests; try again in 5 s", 5)
        self._transport.write(data)

    def hung_up(self) -> None:
        """The engine's process has ended, or is about to."""
        self._started = False
        if not self._stopped:
            self._fail_all(GoneError())
            self._ending = asyncio.get_running_loop().create_task(self._learn_why())

    async def _learn_why(self) -> None:
        self.lose(f"its process {await asyncio.to_thread(self._process.ended)}")

    async def _shut(self) -> None:
        if self._transport is not None:
            self._transport.close()
        await asyncio.to_thread(self._process.end)


class _Link(asyncio.Protocol):
    def __init__(self, client: RemoteEngine) -> None:
        self._client, self._frames = client, Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._client.receive(REPLIES.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._client.hung_up()
