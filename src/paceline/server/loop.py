"""The thread that owns the engine, and the jobs that it works on.

    endpoint.py (other threads)            engine thread
    reserve(job), put(job, requests) ----> enqueue, step, step, ...
    post(StepEvents(events)) <------------ one message a step, for all jobs

Nothing but this thread touches the engine. A job that is cancelled leaves before the next step, and
its cache blocks are free again. However this thread ends, every job is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.engine.recovery import Failure
from paceline.errors import CacheMemoryError, ConfigError, EngineLostError, PacelineError
from paceline.request.completion import StreamEvent
from paceline.server.failures import (
    BusyError,
    DeadlineError,
    DrainingError,
    EngineError,
    GoneError,
    RequestFailedError,
)
from paceline.server.wire import Ended, Fault, Lost, StepEvents, Submit, WireMessage

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.request.request import Request
    from paceline.server.metrics import Metrics

log = logging.getLogger("paceline.server")

# Steps that may fail one after the other before the engine counts as lost.
MAX_FAILURES = 3
_HANGING_SECONDS = 10.0  # that a forward has to fail in, once the model is lost


class EngineJob:
    """The requests of a ticket: reserved, then prepared, then admitted to the engine.

    ``arrived`` by time.perf_counter, from which the seconds of its deadline count.
    """

    def __init__(self, submit: Submit) -> None:
        self.ticket, self.by_request = submit.ticket, submit.by_request
        self.count = len(submit.prompts) * submit.params.n
        self.arrived = time.perf_counter()
        self.deadline = None if submit.seconds is None else self.arrived + submit.seconds
        self.requests: list[Request] = []  # once they are prepared
        self.open: list[Request] = []
        self.admitted = self.cancelled = False


class EngineLoop:
    """Runs an ``LLM`` on a thread of its own. Thread-safe; start it once.

    ``post`` sends a message to those who asked; it is called on the engine thread.
    """

    def __init__(
        self,
        llm: LLM,
        max_queue: int,
        post: Callable[[WireMessage], None],
        metrics: Metrics,
    ) -> None:
        self.llm = llm
        self.lost: str | None = None  # why the thread has ended, if that was not asked for
        self._max_queue, self._post = max_queue, post
        self._metrics = metrics
        self._failed_metrics: set[str] = set()
        self._jobs: dict[int, EngineJob] = {}  # by ticket, in the order of their arrival
        self._prepared: deque[EngineJob] = deque()
        self._wake = threading.Condition()
        self._stopping = self._closed = False
        self._failures = 0
        self._request_seconds = 1.0  # moving average, for Retry-After
        self._broken: str | None = None  # why the model cannot run any more
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        if llm.target.ranks is not None:
            llm.target.ranks.when_lost(self._break)

    # -- for other threads ----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Sequences that have been accepted but do not run yet."""
        reserved = sum(job.count for job in list(self._jobs.values()) if not job.admitted)
        return len(self.llm.engine.scheduler.waiting) + reserved

    @property
    def idle(self) -> bool:
        return not self._jobs

    def reserve(self, job: EngineJob) -> None:
        """Room for its sequences, while they are prepared.

        Raises BusyError, GoneError, and ConfigError for more than can ever wait together.
        """
        with self._wake:
            self._check_capacity(job.count)
            self._jobs[job.ticket] = job

    def withdraw(self, job: EngineJob) -> None:
        """Nothing comes of a reservation."""
        with self._wake:
            self._jobs.pop(job.ticket, None)

    def put(self, job: EngineJob, requests: list[Request]) -> None:
        """Its requests are prepared. Raises GoneError."""
        with self._wake:
            if self._closed:
                raise GoneError
            job.requests, job.open = requests, list(requests)
            for request in requests:  # those that never run have waited since then, too
                request.seq.queued = job.arrived
            self._prepared.append(job)
            self._wake.notify()

    def cancel(self, ticket: int) -> None:
        """It leaves before the next step; unknown or finished ones are ignored."""
        with self._wake:
            job = self._jobs.get(ticket)
            if job is not None:
                job.cancelled = True

    def _check_capacity(self, count: int) -> None:
        if self._closed or self._stopping:
            raise GoneError
        scheduler = self.llm.engine.scheduler
        running = len(scheduler.running)
        most = self._max_queue + scheduler.config.max_batch_size
        if count > most:
            raise ConfigError(
                f"n: {count} sequences in one request, but this server takes {most} at a time "
                "(max_queue and max_batch_size); send fewer prompts, or a smaller n"
            )
        free = max(0, scheduler.config.max_batch_size - running)
        waiting = self.waiting
        if waiting + count > self._max_queue + free:
            seconds = max(1, round(self._request_seconds * (1 + waiting) / max(1, running)))
            raise BusyError(
                f"the queue is full ({waiting} requests wait, {self._max_queue} may); "
                f"try again in {seconds} s",
                seconds,
            )

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; what is unfinished is cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def join(self) -> None:
        """Wait until the thread has ended, and everybody has been told."""
        self._over.wait()

    def _break(self, reason: str) -> None:
        """The model cannot run any more. An idle thread hears of it; one that hangs in a forward
        is not waited for."""
        with self._wake:
            self._broken = reason
            self._wake.notify()
        late = threading.Timer(_HANGING_SECONDS, self._close, [EngineLostError(reason)])
        late.daemon = True
        late.start()

    # -- the engine thread ----------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as caught:
            # Whatever it was: without this thread nobody would ever get an answer.
            error = caught
        self._close(error)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._admitted or self._prepared or self._stopping or self._broken):
                    self._wake.wait()
                if self._stopping:
                    return
                if self._broken is not None:
                    raise EngineLostError(self._broken)
            self._admit()
            self._leave()
            if self.llm.engine.has_work:
                self._step()

    @property
    def _admitted(self) -> list[EngineJob]:
        return [job for job in list(self._jobs.values()) if job.admitted]

    def _admit(self) -> None:
        while self._prepared:
            job = self._prepared.popleft()
            self._tell("queued", job.requests)
            job.admitted = True
            if job.cancelled:
                continue
            try:
                self.llm.enqueue(job.requests)
            except PacelineError as error:
                self._drop(job, "error", error)
            for request in job.requests:
                request.seq.queued = job.arrived

    def _leave(self) -> None:
        """Those whose time is over, or who are not wanted any more."""
        now = time.perf_counter()
        for job in self._admitted:
            if job.deadline is not None and now > job.deadline:
                self._drop(job, "deadline", DeadlineError(job.by_request))
            elif job.cancelled:
                self._drop(job, "cancelled", EngineError("cancelled"))

    def _step(self) -> None:
        try:
            advanced = self.llm.step()
        except EngineLostError:
            raise
        except Exception as error:
            self._recover(error)
            return
        self._failures = 0
        self._tell("stepped", self.llm, advanced)
        self._publish()

    def _tell(self, what: str, *arguments: Any) -> None:
        """To the metrics, whose failures are logged, each kind once, and go no further."""
        try:
            getattr(self._metrics, what)(*arguments)
        except Exception as error:
            if what not in self._failed_metrics:  # every step would fill the log
                self._failed_metrics.add(what)
                log.exception("Metrics.%s failed; decoding goes on", what, exc_info=error)

    def _publish(self) -> None:
        events: list[tuple[int, StreamEvent]] = []
        failed: list[tuple[EngineJob, str]] = []
        for job in self._admitted:
            reason = self._collect(job, events)
            if reason is not None:
                failed.append((job, reason))
            elif not job.open:
                self._forget(job)
        if events:
            self._post(StepEvents(events))
        for job, reason in failed:
            self._drop(job, "error", RequestFailedError(reason))

    def _collect(self, job: EngineJob, events: list[tuple[int, StreamEvent]]) -> str | None:
        """What is new of a job; why it failed, if it did."""
        for request in list(job.open):
            completion = request.completion
            if completion is not None and completion.finish_reason == "error":
                return completion.error or "the engine failed on it"
            new, shown = list(request.events), completion and replace(completion, prompt="")
            request.events.clear()
            if completion is not None:
                if not new:  # it is not streamed
                    new = [StreamEvent(request.number, request.index, "", [], [])]
                new[-1] = replace(new[-1], completion=shown)
                job.open.remove(request)
                self._tell("finished", request, completion.finish_reason)
                seconds = completion.stats.decode_seconds
                self._request_seconds += 0.1 * (seconds - self._request_seconds)
            events += [(job.ticket, event) for event in new]
        return None

    def _drop(self, job: EngineJob, outcome: str, error: Exception) -> None:
        """A job ends before its requests do."""
        for request in job.open:
            self._tell("finished", request, outcome)
        self._forget(job)
        self._post(Ended(job.ticket, Fault.of(error)))

    def _forget(self, job: EngineJob) -> None:
        self.llm.release(job.requests)
        self.withdraw(job)

    def _recover(self, error: Exception) -> None:
        """A step failed. Whoever ran is told; the cache is whole again and others go on.

        Raises EngineLostError once step after step fails.
        """
        running = {seq.seq_id for seq in self.llm.engine.scheduler.running}
        if isinstance(error, CacheMemoryError):
            shown: Exception = error
        else:
            self._failures += 1
            log.exception("a step of the engine failed", exc_info=error)
            shown = EngineError("the engine failed on this request; see the server's log")
        for job in self._admitted:
            if any(request.seq.seq_id in running for request in job.open):
                self._drop(job, "error", shown)
        if self._failures >= MAX_FAILURES:
            kind = type(error).__name__
            raise EngineLostError(f"{MAX_FAILURES} steps failed one after the other ({kind})")

    # -- the end of the thread ------------------------------------------------------------------

    def _close(self, error: BaseException | None) -> None:
        """Tell everybody. Nothing here may stop the rest: the engine may be beyond all help."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._prepared.clear()
        ending: Exception = DrainingError("the server has shut down")
        if error is not None:
            self.lost = Failure.of(error).message
            ending = GoneError()
            planned = isinstance(error, EngineLostError)
            log.critical(
                "the engine's thread has ended: %s", self.lost, exc_info=None if planned else error
            )
        for job in jobs:
            for request in job.open:
                self._tell("finished", request, "cancelled" if error is None else "error")
            _quietly(self.llm.release, job.requests)
        if self.lost is not None:  # first, so that nobody who is told finds the server alive
            _quietly(self._post, Lost(self.lost))
        for job in jobs:
            _quietly(self._post, Ended(job.ticket, Fault.of(ending)))
        self._over.set()


def _quietly(action: Callable[[Any], None], argument: Any) -> None:
    try:
        action(argument)
    except Exception as error:
        log.debug("while the engine's thread ended: %s", error)
