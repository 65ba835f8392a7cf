"""The engine's end of the messages in wire.py, in whichever process it is."""

from __future__ import annotations

import logging
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


class EngineEndpoint:
    """Takes messages from the HTTP side, and posts the answers; has the engine's thread.

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
        self.metrics.watch(llm.engine, lambda: self.loop.waiting)
        self._post = post
        # One thread: the grammar compiler's tokenizer is not made for several.
        self._preparing = ThreadPoolExecutor(1, "paceline-prepare")

    def stop(self) -> None:
        """What is unfinished is cancelled, and its client told."""
        self.loop.stop()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def handle(self, message: WireMessage) -> None:
        """Called on one thread only."""
        if isinstance(message, Submit):
            job = EngineJob(message)
            try:
                self.loop.reserve(job)
                self._preparing.submit(self._prepare, message, job)
            except PacelineError as error:
                self._post(Ended(message.ticket, Fault.of(error)))
        elif isinstance(message, Cancel):
            self.loop.cancel(message.ticket)
        elif isinstance(message, Scrape):
            self._post(Scraped(message.number, self.metrics.render()))

    def _prepare(self, submit: Submit, job: EngineJob) -> None:
        try:
            requests = [
                request
                for number, prompt in enumerate(submit.prompts)
                for request in self.llm.prepare(prompt, submit.params, number, submit.streams)
            ]
            for request in requests:
                request.whole_characters = True
            self._post(Accepted(submit.ticket))  # before the events of the first step
            self.loop.put(job, requests)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request could not be prepared", exc_info=error)
            self.loop.withdraw(job)
            self._post(Ended(submit.ticket, Fault.of(error)))
