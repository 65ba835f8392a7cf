"""The engine's side of the connection: handles the messages of wire.py and steps the engine.

    handle(message)    runs on the thread that reads the connection; it never blocks
    _prepare(...)      runs on one of three worker threads: quick requests, grammars, weight files
    _run()             runs on the engine thread: one step, then one StepEvents message for all jobs

Only one thread at a time uses the engine, under the lock of ``EngineOwner`` (request/owner.py).
Cancelled jobs are removed before the next step. When the engine thread ends, for whatever reason,
the clients of all jobs are notified."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from paceline.engine.recovery import Failure
from paceline.errors import EngineLostError, PacelineError
from paceline.request.completion import StreamEvent
from paceline.server import failures, wire
from paceline.server.metrics import Metrics

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.request.request import Request

log = logging.getLogger("paceline.server")

_STOP_SECONDS = 10.0  # how long ``stop`` waits for the engine thread
_HANGING_SECONDS = 10.0  # how long a forward may hang after the model was lost


class Link:
    """The engine's end of the connection. ``on_close`` is called once the other end is closed."""

    def __init__(self, connection: socket.socket, on_close: Callable[[], None]) -> None:
        self._connection, self._on_close = connection, on_close
        self._send_lock = threading.Lock()
        self.loop: EngineLoop | None = None

    def send(self, message: wire.WireMessage) -> None:
        """Send a message. Blocks, and so does the engine, while the HTTP side does not read."""
        data = wire.encode_message(message)
        try:
            with self._send_lock:
                self._connection.sendall(data)
        except OSError:
            self._on_close()

    def read(self) -> None:
        """Handle messages until the HTTP side closes the connection."""
        while (body := wire.read_message(self._connection)) is not None:
            assert self.loop is not None, "a message arrived before the Hello was sent"
            self.loop.handle(wire.REQUESTS.decode(body))
        self._on_close()


class EngineJob:
    """The requests of one ticket, with those still ``unfinished``; both empty until prepared.
    ``arrived`` is a time of time.perf_counter; ``outcome`` says why the job was cancelled."""

    def __init__(self, submit: wire.Submit) -> None:
        self.ticket = submit.number
        self.count = len(submit.prompts) * submit.params.n
        self.arrived = time.perf_counter()
        self.requests: list[Request] = []
        self.unfinished: list[Request] = []
        self.outcome: str | None = None


class EngineLoop:
    """Runs an ``LLM`` on an engine thread; start it once. ``post`` sends a message to the HTTP side
    and is called on several threads."""

    def __init__(self, llm: LLM, post: Callable[[wire.WireMessage], None]) -> None:
        self.llm = llm
        self.lost: str | None = None  # why the engine thread failed
        self.metrics = Metrics()
        self.metrics.watch_engine(llm.engine, lambda: self.waiting)
        self._post = post
        self._jobs: dict[int, EngineJob] = {}  # by ticket number, in order of arrival
        # Wakes the engine thread: None for new requests, an error to end it.
        self._wakeups: SimpleQueue[PacelineError | None] = SimpleQueue()
        self._closed = threading.Lock()  # taken once, when clients are notified of the end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        # Compiling a large grammar, hashing all weights for the first receipt, and loading an
        # adapter take seconds. Separate workers keep other requests from waiting for that.
        self._prepare_worker, self._grammar_worker, self._weights_worker = (
            ThreadPoolExecutor(1, f"paceline-{name}") for name in ("prepare", "compile", "read")
        )
        if llm.target.ranks is not None:
            llm.target.ranks.on_failure(self._model_lost)

    # -- called by other threads ----------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of sequences that have arrived but are not running yet."""
        jobs = list(self._jobs.values())
        unfinished = sum(len(job.unfinished) if job.requests else job.count for job in jobs)
        return max(0, unfinished - len(self.llm.engine.scheduler.running))

    def handle(self, message: wire.WireMessage) -> None:
        """Handle a message of the HTTP side; called on the thread that reads the connection."""
        if isinstance(message, wire.Submit):
            job = self._jobs[message.number] = EngineJob(message)
            worker = self._prepare_worker
            if message.params.receipt:
                worker = self._weights_worker
            elif message.params.grammar is not None:
                worker = self._grammar_worker
            worker.submit(self._reply, message.number, partial(self._prepare, message, job))
        elif isinstance(message, wire.Cancel):
            cancelled = self._jobs.get(message.number)
            if cancelled is None:  # it has ended
                self._post(wire.Done(message.number))
            else:
                cancelled.outcome = message.outcome
        elif isinstance(message, wire.Scrape):
            self._reply(message.number, self.metrics.render)
        elif isinstance(message, wire.SetAdapter):
            worker = self._prepare_worker if message.folder is None else self._weights_worker
            worker.submit(self._reply, message.number, partial(self._set_adapter, message))

    def _reply(self, number: int, work: Callable[[], str | None]) -> None:
        """Run ``work`` and post its result, or the error that it raised."""
        try:
            self._post(wire.Done(number, work() or ""))
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request could not be prepared", exc_info=error)
            self._post(wire.Ended(number, failures.as_api_error(error)))

    def _set_adapter(self, message: wire.SetAdapter) -> None:
        if message.folder is None:
            self.llm.adapters.unload(message.name)
        else:
            self.llm.adapters.load(message.name, message.folder, replace=True)

    def _prepare(self, submit: wire.Submit, job: EngineJob) -> None:
        """Make the requests of a job and queue them. Raises PacelineError."""
        try:
            requests = self.llm.prepare_all(submit.prompts, submit.params, submit.streams)
            for request in requests:
                request.whole_characters = True
                request.prompt = ""  # the HTTP side knows it
                request.seq.queued = job.arrived
            self.llm.owner.enqueue(requests)
            self.metrics.record_queued(requests)
            # Setting ``requests`` makes the job visible to the engine thread.
            job.unfinished, job.requests = list(requests), requests
            self._wakeups.put(None)
            if self._closed.locked():
                raise failures.engine_lost()
        except Exception:
            self._forget(job)
            raise

    def stop(self) -> None:
        """End the engine thread; cancel unfinished requests and notify their clients."""
        self._wakeups.put(failures.shutting_down("the server has shut down"))
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        for worker in (self._prepare_worker, self._grammar_worker, self._weights_worker):
            worker.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the engine thread has ended and all clients have been notified."""
        self._ended.wait()

    def _model_lost(self, reason: str) -> None:
        """End the engine thread because the model cannot run any more. If a forward hangs, clients
        are notified after ``_HANGING_SECONDS`` without waiting for it."""
        lost = EngineLostError(reason)
        self._wakeups.put(lost)
        timeout = threading.Timer(_HANGING_SECONDS, self._close, [lost])
        timeout.daemon = True
        timeout.start()

    # -- the engine thread ----------------------------------------------------------------------

    def _run(self) -> None:
        """Step while there are jobs, else sleep, until a step fails or an error is in ``_wakeups``.
        All jobs end with that, whatever its kind: without this thread no request would end."""
        try:
            while True:
                while not (self._prepared and self._wakeups.empty()):
                    if (end := self._wakeups.get()) is not None:
                        raise end
                for job in self._prepared:
                    if job.outcome is not None:  # cancelled
                        self._finish(job, job.outcome)
                        tokens = sum(request.seq.generated for request in job.requests)
                        self._post(wire.Done(job.ticket, str(tokens)))
                if self.llm.engine.has_work:
                    self.metrics.record_step(self.llm, self.llm.owner.step())
                # Jobs may also have ended without a step.
                self._publish()
        except BaseException as error:
            self._close(error)

    @property
    def _prepared(self) -> list[EngineJob]:
        return [job for job in list(self._jobs.values()) if job.requests]

    def _publish(self) -> None:
        """Post the new events of all jobs in one message, and end the jobs that are complete."""
        events: list[tuple[int, StreamEvent]] = []
        failed: list[tuple[EngineJob, str]] = []
        for job in self._prepared:
            reason = self._collect(job, events)
            if reason is not None:
                failed.append((job, reason))
            elif not job.unfinished:
                self._forget(job)
        if events:
            self._post(wire.StepEvents(events))
        for job, reason in failed:
            self._finish(job, "error", failures.request_failed(reason))

    def _collect(self, job: EngineJob, events: list[tuple[int, StreamEvent]]) -> str | None:
        """Append a job's new events to ``events``; returns the reason if the job failed."""
        for request in list(job.unfinished):
            completion = request.completion
            if completion is not None and completion.finish_reason == "error":
                return completion.error or "the engine failed on this request"
            events += [(job.ticket, event) for event in request.events]
            request.events.clear()
            if completion is not None:
                job.unfinished.remove(request)
                self.metrics.record_finished(request, completion.finish_reason)
        return None

    def _finish(self, job: EngineJob, outcome: str, error: Exception | None = None) -> None:
        """End a job whose requests are unfinished; its client gets the ``error``, if any."""
        for request in job.unfinished:
            self.metrics.record_finished(request, outcome)
        self._forget(job)
        if error is not None:
            self._post(wire.Ended(job.ticket, failures.as_api_error(error)))

    def _forget(self, job: EngineJob) -> None:
        self.llm.owner.release(job.requests)
        self._jobs.pop(job.ticket, None)

    def _close(self, error: BaseException) -> None:
        """End all jobs with ``error`` (an APIError reaches clients unchanged). The engine may be in
        any state, so an error in one of these steps must not prevent the others."""
        if not self._closed.acquire(blocking=False):
            return
        jobs = list(self._jobs.values())
        self._jobs.clear()
        ending = error if isinstance(error, failures.APIError) else failures.engine_lost()
        if ending is not error:
            self.lost = Failure.of(error).message
            planned = isinstance(error, EngineLostError)
            log.critical(
                "the engine thread has ended: %s", self.lost, exc_info=None if planned else error
            )
        for job in jobs:
            with suppress(Exception):
                self._finish(job, "cancelled" if ending is error else "error")
        if self.lost is not None:  # first, so that no notified client finds the server alive
            self._post(wire.Lost(self.lost))
        for job in jobs:
            self._post(wire.Ended(job.ticket, ending))
        self._ended.set()
