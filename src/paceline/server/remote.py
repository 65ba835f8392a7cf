"""The engine in a process of its own, seen from the process that speaks HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.server.client import EngineClient, Limits
from paceline.server.failures import BusyError, GoneError
from paceline.server.wire import REPLIES, WireMessage, framed, next_message

if TYPE_CHECKING:
    from paceline.server.process import EngineProcess
    from paceline.server.wire import Facts

# Bytes that an engine process may leave unread before new requests are refused.
MAX_UNSENT = 64 * 2**20


class RemoteEngine(EngineClient):
    """Messages go through the socket of an ``EngineProcess`` that has said hello."""

    def __init__(self, process: EngineProcess, facts: Facts, limits: Limits | None = None) -> None:
        super().__init__(facts, limits)
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection)
        self._reading = asyncio.create_task(self._read(reader))
        self._started = True

    def _post(self, message: WireMessage) -> None:
        if self._writer is None or self._writer.is_closing():
            raise GoneError
        try:
            data = framed(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"the request cannot be read: {error}") from None
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            raise BusyError("the engine does not take requests; try again in 5 s", 5)
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the engine's process has ended, or is about to."""
        try:
            while (body := await next_message(reader)) is not None:
                self.receive(REPLIES.decode(body))
        finally:
            self._started = False
            if not self._stopped:
                self._fail_all(GoneError())
                self.lose(f"its process {await asyncio.to_thread(self._process.ended)}")

    async def _shut(self) -> None:
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._process.end)
