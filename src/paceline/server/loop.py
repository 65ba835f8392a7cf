"""The engine's side of wire.py's messages: the engine thread and its jobs.

    handle(message)         on one thread, which never waits
    _prepare(...)           on three, by what takes long: nothing, a grammar, reading weights
    _run()                  on the engine thread: step, then post(StepEvents) for all jobs

One thread at a time uses the engine, under its owner's lock (request/owner.py). Cancelled jobs
leave before the next step. However the engine thread ends, all jobs are told.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from paceline.engine.recovery import Failure
from paceline.errors import EngineLostError, PacelineError
from paceline.request.completion import StreamEvent
from paceline.server import wire
from paceline.server.failures import APIError, as_api_error, draining, engine_lost, request_failed
from paceline.server.metrics import Metrics

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.request.request import Request

log = logging.getLogger("paceline.server")

_STOP_SECONDS = 10.0  # for the thread to end
_HANGING_SECONDS = 10.0  # for a hanging forward to fail after the model is lost


class Link:
    """This side of the connection, for any thread. ``end`` is called when the other side closes."""

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        self._connection, self._end = connection, end
        self._writing = threading.Lock()
        self.loop: EngineLoop | None = None

    def send(self, message: wire.WireMessage) -> None:
        """Waits while the other process does not read; the engine then waits, too."""
        data = wire.encode_message(message)
        try:
            with self._writing:
                self._connection.sendall(data)
        except OSError:
            self._end()

    def read(self) -> None:
        """Handle messages until the other process ends."""
        while (body := wire.read_message(self._connection)) is not None:
            assert self.loop is not None, "nothing is asked before the hello"
            self.loop.handle(wire.REQUESTS.decode(body))
        self._end()


class EngineJob:
    """The requests of a ticket: none before they are prepared; ``open`` ones are unfinished.
    ``arrived``: by time.perf_counter. ``outcome``: why it is cancelled."""

    def __init__(self, submit: wire.Submit) -> None:
        self.ticket = submit.number
        self.count = len(submit.prompts) * submit.params.n
        self.arrived = time.perf_counter()
        self.requests: list[Request] = []
        self.open: list[Request] = []
        self.outcome: str | None = None


class EngineLoop:
    """Runs an ``LLM`` on its own thread; start it once. ``post`` sends a message to the clients, on
    several threads. ``alias_of``: see ``Metrics``."""

    def __init__(
        self, llm: LLM, post: Callable[[wire.WireMessage], None], alias_of: str | None = None
    ) -> None:
        self.llm = llm
        self.lost: str | None = None  # why the thread ended unasked
        self.metrics = Metrics(alias_of)
        self.metrics.watch(llm.engine, lambda: self.waiting)
        self._post = post
        self._jobs: dict[int, EngineJob] = {}  # by ticket, in the order of their arrival
        # What wakes the engine thread: new requests (None), or why it is to end.
        self._wakes: SimpleQueue[PacelineError | None] = SimpleQueue()
        self._closed = threading.Lock()  # held from when clients are told of the end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        # A large grammar, the hash of all weights for a first receipt, or a new adapter takes
        # seconds, and other requests do not wait for that.
        self._preparing, self._compiling, self._reading = (
            ThreadPoolExecutor(1, f"paceline-{name}") for name in ("prepare", "compile", "read")
        )
        if llm.target.ranks is not None:
            llm.target.ranks.when_lost(self._break)

    # -- for other threads ----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Sequences that have arrived but do not run yet."""
        jobs = list(self._jobs.values())
        unfinished = sum(len(job.open) if job.requests else job.count for job in jobs)
        return max(0, unfinished - len(self.llm.engine.scheduler.running))

    def handle(self, message: wire.WireMessage) -> None:
        """Called on one thread only."""
        if isinstance(message, wire.Submit):
            job = self._jobs[message.number] = EngineJob(message)
            plain = self._preparing if message.params.grammar is None else self._compiling
            pool = self._reading if message.params.receipt else plain
            pool.submit(self._answer, message.number, partial(self._prepare, message, job))
        elif isinstance(message, wire.Cancel):
            cancelled = self._jobs.get(message.number)
            if cancelled is not None:
                cancelled.outcome = message.outcome
        elif isinstance(message, wire.Scrape):
            self._answer(message.number, self.metrics.render)
        elif isinstance(message, wire.SetAdapter):
            pool = self._preparing if message.folder is None else self._reading
            pool.submit(self._answer, message.number, partial(self._set_adapter, message))

    def _answer(self, number: int, work: Callable[[], str | None]) -> None:
        """Do what was asked and say so, or why it failed."""
        try:
            self._post(wire.Done(number, work() or ""))
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request could not be prepared", exc_info=error)
            self._post(wire.Ended(number, as_api_error(error)))

    def _set_adapter(self, message: wire.SetAdapter) -> None:
        if message.folder is None:
            self.llm.adapters.unload(message.name)
        else:
            self.llm.adapters.load(message.name, message.folder, replace=True)

    def _prepare(self, submit: wire.Submit, job: EngineJob) -> None:
        try:
            requests = [
                request
                for number, prompt in enumerate(submit.prompts)
                for request in self.llm.prepare(prompt, submit.params, number, submit.streams)
            ]
            for request in requests:
                request.whole_characters = True
                request.seq.queued = job.arrived
            self.llm.enqueue(requests)
            self.metrics.queued(requests)
            # Setting ``requests`` makes the job visible.
            job.open, job.requests = list(requests), requests
            self._wakes.put(None)
            if self._closed.locked():
                raise engine_lost()
        except Exception:
            self._forget(job)
            raise

    def stop(self) -> None:
        """End the thread; cancel unfinished requests and tell their clients."""
        self._wakes.put(draining("the server has shut down"))
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        for pool in (self._preparing, self._compiling, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the thread has ended and all clients have been told."""
        self._over.wait()

    def _break(self, reason: str) -> None:
        """The model cannot run any more. A thread that hangs in a forward is not waited for."""
        lost = EngineLostError(reason)
        self._wakes.put(lost)
        late = threading.Timer(_HANGING_SECONDS, self._close, [lost])
        late.daemon = True
        late.start()

    # -- the engine thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # any: without this thread no request would end
            self._close(error)

    def _work(self) -> None:
        while True:
            while not (self._prepared and self._wakes.empty()):
                if (end := self._wakes.get()) is not None:
                    raise end
            for job in self._prepared:
                if job.outcome is not None:  # cancelled
                    self._finish(job, job.outcome)
            if self.llm.engine.has_work:
                advanced = self.llm.step()
                self.metrics.stepped(self.llm, advanced)
            # Also for jobs that ended without a step.
            self._publish()

    @property
    def _prepared(self) -> list[EngineJob]:
        return [job for job in list(self._jobs.values()) if job.requests]

    def _publish(self) -> None:
        events: list[tuple[int, StreamEvent]] = []
        failed: list[tuple[EngineJob, str]] = []
        for job in self._prepared:
            reason = self._collect(job, events)
            if reason is not None:
                failed.append((job, reason))
            elif not job.open:
                self._forget(job)
        if events:
            self._post(wire.StepEvents(events))
        for job, reason in failed:
            self._finish(job, "error", request_failed(reason))

    def _collect(self, job: EngineJob, events: list[tuple[int, StreamEvent]]) -> str | None:
        """Append a job's new events to ``events``; returns why it failed, if it did."""
        for request in list(job.open):
            completion = request.completion
            if completion is not None and completion.finish_reason == "error":
                return completion.error or "the engine failed on it"
            new = list(request.events)
            request.events.clear()
            if completion is not None:
                if not new:  # it is not streamed
                    new = [StreamEvent(request.number, request.index, "", [], [])]
                new[-1] = replace(new[-1], completion=replace(completion, prompt=""))
                job.open.remove(request)
                self.metrics.finished(request, completion.finish_reason)
            events += [(job.ticket, event) for event in new]
        return None

    def _finish(self, job: EngineJob, outcome: str, error: Exception | None = None) -> None:
        """End a job before its requests; its client gets the ``error``."""
        for request in job.open:
            self.metrics.finished(request, outcome)
        self._forget(job)
        if error is not None:
            self._post(wire.Ended(job.ticket, as_api_error(error)))

    def _forget(self, job: EngineJob) -> None:
        self.llm.release(job.requests)
        self._jobs.pop(job.ticket, None)

    def _close(self, error: BaseException) -> None:
        """Tell all clients, an APIError as it is. Nothing here may stop the rest: the engine may be
        in any state."""
        if not self._closed.acquire(blocking=False):
            return
        jobs = list(self._jobs.values())
        self._jobs.clear()
        ending = error if isinstance(error, APIError) else engine_lost()
        if ending is not error:
            self.lost = Failure.of(error).message
            planned = isinstance(error, EngineLostError)
            log.critical(
                "the engine's thread has ended: %s", self.lost, exc_info=None if planned else error
            )
        for job in jobs:
            with suppress(Exception):
                self._finish(job, "cancelled" if ending is error else "error")
        if self.lost is not None:  # first: no client that is told may find the server alive
            self._post(wire.Lost(self.lost))
        for job in jobs:
            self._post(wire.Ended(job.ticket, ending))
        self._over.set()
