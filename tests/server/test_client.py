"""``EngineClient`` beside an engine that does not read its messages."""

from __future__ import annotations

import asyncio
import socket

from paceline.core.params import SamplingParams
from paceline.request.validation import ContextBudget
from paceline.server import wire
from paceline.server.client import EngineClient
from paceline.server.config import ServeConfig


class SlowEngine:
    """The other end of the connection; it reads when asked to."""

    facts = wire.Facts(ContextBudget("m", 100, 100), (), "float32", "cpu", "reference")

    def __init__(self) -> None:
        self._connection, self.theirs = socket.socketpair()

    def start(self) -> socket.socket:
        return self._connection

    def exit_reason(self) -> str:
        return "has ended"

    def close(self) -> None:
        self.theirs.close()

    def read(self) -> wire.EngineCommand:
        body = wire.read_message(self.theirs)
        assert body is not None
        return wire.REQUESTS.decode(body)


def test_what_is_cancelled_is_told_to_an_engine_that_is_behind() -> None:
    """A cancelled request would decode to its end."""
    engine, params = SlowEngine(), SamplingParams()

    async def run() -> None:
        clients = EngineClient(engine, ServeConfig())
        await clients.start()
        submitted = asyncio.create_task(clients.submit([[1, 2]], params))
        await asyncio.sleep(0.01)
        engine.read()
        engine.theirs.sendall(wire.encode_message(wire.Done(1)))
        ticket = await submitted
        late = asyncio.create_task(clients.submit([[5] * 500_000], params))
        await asyncio.sleep(0.01)
        ticket.cancel()
        commands = [await asyncio.to_thread(engine.read) for _ in range(2)]
        assert [type(command) for command in commands] == [wire.Submit, wire.Cancel]
        late.cancel()
        await clients.stop()

    asyncio.run(run())
