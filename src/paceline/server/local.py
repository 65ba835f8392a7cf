"""The engine in the process that speaks HTTP, on a thread of its own (``--single-process``)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.server.client import EngineClient, Limits
from paceline.server.endpoint import EngineEndpoint
from paceline.server.security import RequestLimits
from paceline.server.service import Service
from paceline.server.wire import Facts, WireMessage

if TYPE_CHECKING:
    from paceline.llm import LLM


class LocalEngine(EngineClient):
    """Messages are handed over as they are; nothing is encoded."""

    def __init__(self, llm: LLM, limits: Limits | None = None, alias_of: str | None = None) -> None:
        super().__init__(Facts.of(llm), limits)
        self.llm = llm
        self.endpoint = EngineEndpoint(llm, self.limits.max_queue, self._from_engine, alias_of)
        self._events: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._events = asyncio.get_running_loop()
        self._started = True
        self.endpoint.loop.start()

    @property
    def alive(self) -> bool:
        return super().alive and self.endpoint.loop.alive

    @property
    def idle(self) -> bool:
        return super().idle and self.endpoint.loop.idle

    def _post(self, message: WireMessage) -> None:
        self.endpoint.handle(message)

    def _from_engine(self, message: WireMessage) -> None:
        """On any thread."""
        assert self._events is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._events.call_soon_threadsafe(self.receive, message)

    async def _shut(self) -> None:
        await asyncio.to_thread(self.endpoint.stop)


def local_service(
    llm: LLM,
    model: str,
    limits: Limits | None = None,
    asks: RequestLimits | None = None,
    log_prompts: bool = False,
    alias_of: str | None = None,
) -> Service:
    """A service over a loaded model, served under the name ``model``."""
    engine = LocalEngine(llm, limits, alias_of)
    return Service(engine, llm.tokenizer, model, asks, log_prompts)
