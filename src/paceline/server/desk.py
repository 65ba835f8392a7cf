"""The engine's side of the conversation in wire.py, in whichever process it is held."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.server.loop import EngineJob, EngineLoop
from paceline.server.metrics import Metrics
from paceline.server.metrics_alias import VllmNames
from paceline.server.wire import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    Scrape,
    Scraped,
    Submit,
    WireMessage,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")


class Desk:
    """Takes messages from those who speak HTTP, and posts the answers; owns the engine's thread.

    ``handle`` never waits for the engine or for a grammar to be compiled.
    """

    def __init__(
        self,
        llm: LLM,
        max_queue: int,
        post: Callable[[WireMessage], None],
        alias_of: str | None = None,
    ) -> None:
        """``post`` is called from several threads. ``alias_of``: metrics have vLLM's names, too,
        as those of the model that is served under this name."""
        self.llm = llm
        self.metrics = Metrics()
        if alias_of is not None:
            self.metrics.registry.register(VllmNames(self.metrics.registry, alias_of))
        self.loop = EngineLoop(llm, max_queue, post, self.metrics)
        self.metrics.watch(self.loop)
        self._post = post
        # One thread: the grammar compiler's tokenizer is not made for several.
        self._preparing = ThreadPoolExecutor(1, "paceline-prepare")

    def start(self) -> None:
        self.loop.start()

    def stop(self) -> None:
        """What is unfinished is cancelled, and told."""
        self.loop.stop()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def handle(self, message: WireMessage) -> None:
        """Called on one thread only."""
        if isinstance(message, Submit):
            self._take(message)
        elif isinstance(message, Cancel):
            self.loop.cancel(message.ticket)
        elif isinstance(message, Scrape):
            self._post(Scraped(message.number, self.metrics.render()))

    def _take(self, submit: Submit) -> None:
        arrived = time.perf_counter()
        try:
            self.loop.reserve(submit.ticket, len(submit.prompts) * submit.params.n)
            self._preparing.submit(self._prepare, submit, arrived)
        except PacelineError as error:
            self._post(Ended(submit.ticket, Fault.of(error)))

    def _prepare(self, submit: Submit, arrived: float) -> None:
        try:
            requests = [
                request
                for number, prompt in enumerate(submit.prompts)
                for request in self.llm.prepare(prompt, submit.params, number, submit.streams)
            ]
            # Before the first step can be told: nothing comes before this.
            self._post(Accepted(submit.ticket))
            self.loop.put(EngineJob(submit.ticket, requests, submit.seconds, submit.own, arrived))
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request could not be prepared", exc_info=error)
            self.loop.withdraw(submit.ticket)
            self._post(Ended(submit.ticket, Fault.of(error)))
