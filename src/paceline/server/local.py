"""The engine in the process that speaks HTTP, on a thread of its own (``--single-process``)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.cli.options import set_threads
from paceline.cli.output import quiet_libraries
from paceline.server.client import EngineClient, Limits
from paceline.server.loop import EngineLoop
from paceline.server.security import RequestLimits
from paceline.server.service import Service
from paceline.server.wire import Facts, WireMessage
from paceline.settings import explicit

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.server.config import ServeConfig


def load_llm(config: ServeConfig) -> LLM:
    """Raises what ``LLM`` does."""
    quiet_libraries()
    set_threads(config.threads)
    from paceline import LLM

    settings = explicit(vars(config), "LLM")
    return LLM(config.model, config.drafts, profile=config.profile, **settings)


class LocalEngine(EngineClient):
    """Messages are handed over as they are; nothing is encoded."""

    def __init__(self, llm: LLM, limits: Limits | None = None, alias_of: str | None = None) -> None:
        super().__init__(Facts.of(llm), limits)
        self.llm = llm
        self.loop = EngineLoop(llm, self._from_engine, alias_of)
        self._events: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._events = asyncio.get_running_loop()
        self._started = True
        self.loop.start()

    def _post(self, message: WireMessage) -> None:
        self.loop.handle(message)

    def _from_engine(self, message: WireMessage) -> None:
        """On any thread."""
        assert self._events is not None
        with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._events.call_soon_threadsafe(self.receive, message)

    async def _shut(self) -> None:
        await asyncio.to_thread(self.loop.stop)


def local_service(
    llm: LLM,
    model: str,
    limits: Limits | None = None,
    asks: RequestLimits | None = None,
    log_prompts: bool = False,
    alias_of: str | None = None,
) -> Service:
    """A service over a loaded model, served under the name ``model``."""
    client = LocalEngine(llm, limits, alias_of)
    return Service(client, llm.tokenizer, model, asks, log_prompts)
