"""The thread that owns the engine, and the tickets by which HTTP handlers follow their requests.

    handler (asyncio)                      engine thread
    submit(prompt, params) --- inbox ----> enqueue, step, step, ...
    async for events in ticket <---------- one delivery a step and ticket

Nothing but this thread touches the engine. A ticket that nobody reads any more (its client has
gone) is cancelled at the next step, and its cache blocks are free again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.completion import StreamEvent
from paceline.core.batch import Commit
from paceline.errors import CacheMemoryError, EngineLostError, PacelineError

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.llm import LLM, Prompt
    from paceline.request import Request

log = logging.getLogger("paceline.server")


class BusyError(PacelineError):
    """The queue is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(PacelineError):
    """The server is shutting down and takes no new requests."""


class DeadlineError(PacelineError):
    """A request was not done in time and has been cancelled.

    ``own``: the deadline was the request's, not the server's.
    """

    def __init__(self, own: bool) -> None:
        whose = "its own deadline" if own else "the server's deadline"
        super().__init__(f"the request was not done by {whose}; ask for fewer tokens")
        self.own = own


class EngineError(PacelineError):
    """The engine failed on a step; the message is for the log, not for clients."""


class Observer(Protocol):
    """Sees what happens on the engine thread; see metrics.py."""

    def queued(self, requests: Sequence[Request]) -> None: ...

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None: ...

    def finished(self, request: Request, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled", "deadline" or "error"."""
        ...


class SilentObserver:
    def queued(self, requests: Sequence[Request]) -> None:
        pass

    def stepped(self, llm: LLM, advanced: Sequence[tuple[Request, Commit]]) -> None:
        pass

    def finished(self, request: Request, outcome: str) -> None:
        pass


@dataclass(frozen=True)
class Limits:
    """``max_queue``: requests that may wait beside those that run; ``deadline`` seconds a request
    may take from its arrival, None for no limit."""

    max_queue: int = 64
    deadline: float | None = 600.0


_Delivery = list[StreamEvent] | BaseException


class Ticket:
    """What a handler holds of its submitted requests. Iterate over it once; ``cancel`` is free."""

    def __init__(
        self, requests: list[Request], own_deadline: float | None, deadline: float | None
    ) -> None:
        """Deadlines in seconds from now: the request's own, and the server's."""
        self.requests = requests
        limits = [seconds for seconds in (own_deadline, deadline) if seconds is not None]
        self.deadline = time.perf_counter() + min(limits) if limits else None
        self.own_deadline = bool(limits) and own_deadline == min(limits)
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._deliveries: asyncio.Queue[_Delivery] = asyncio.Queue()

    def cancel(self) -> None:
        """Its sequences leave at the next step; unknown or finished ones are ignored."""
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        """What each step added, until all its requests are complete.

        Raises DeadlineError, CacheMemoryError or EngineError. Leaving early cancels.
        """
        open_requests = len(self.requests)
        try:
            while open_requests:
                delivery = await self._deliveries.get()
                if isinstance(delivery, BaseException):
                    raise delivery
                open_requests -= sum(event.completion is not None for event in delivery)
                yield delivery
        finally:
            self.cancel()

    # -- called on the engine thread -----------------------------------------------------------

    def deliver(self, delivery: _Delivery) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliveries.put_nowait, delivery)
        except RuntimeError:  # the event loop has been closed: nobody listens any more
            self.cancelled = True

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if request.completion is None]


class EngineLoop:
    """Runs an ``LLM`` on a thread of its own. Thread-safe; start it once."""

    def __init__(
        self, llm: LLM, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.llm = llm
        self.limits = limits or Limits()
        self._observer: Observer = observer or SilentObserver()
        self._inbox: deque[Ticket] = deque()
        self._tickets: list[Ticket] = []
        self._wake = threading.Condition()
        self._preparing = threading.Lock()  # one tokeniser, not made for several threads
        self._draining = self._stopping = False
        self._request_seconds = 1.0  # moving average, for Retry-After
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # -- for the event loop's thread ------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Takes new requests."""
        return self.alive and not self._draining

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Sequences that have been accepted but do not run yet."""
        return len(self.llm.engine.scheduler.waiting) + sum(
            len(ticket.requests) for ticket in list(self._inbox)
        )

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        deadline: float | None = None,
    ) -> Ticket:
        """Queue ``n`` requests for each prompt.

        ``deadline`` in seconds shortens the server's own. Raises BusyError, DrainingError,
        PromptError, ConfigError; what fails later is raised by the ticket.
        """
        self._check_room(len(prompts) * params.n)
        requests = await asyncio.to_thread(self._prepare, prompts, params)
        ticket = Ticket(requests, deadline, self.limits.deadline)
        with self._wake:
            self._check_room(len(requests))
            self._inbox.append(ticket)
            self._wake.notify()
        return ticket

    def _prepare(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
        with self._preparing:
            return [
                request
                for number, prompt in enumerate(prompts)
                for request in self.llm.prepare(prompt, params, number)
            ]

    def _check_room(self, count: int) -> None:
        if not self.alive:
            raise EngineError("the engine has stopped; restart the server")
        if self._draining:
            raise DrainingError("the server is shutting down; send the request elsewhere")
        running = len(self.llm.engine.scheduler.running)
        free = self.llm.engine.scheduler.config.max_batch_size - running
        waiting = self.waiting
        if waiting + count > self.limits.max_queue + max(0, free):
            seconds = max(1, round(self._request_seconds * (1 + waiting) / max(1, running)))
            raise BusyError(
                f"the queue is full ({waiting} requests wait, {self.limits.max_queue} may); "
                f"try again in {seconds} s",
                seconds,
            )

    def drain(self) -> None:
        """Take no new requests; those accepted are finished."""
        self._draining = True

    @property
    def idle(self) -> bool:
        return not self._inbox and not self._tickets

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; what is unfinished is cancelled."""
        with self._wake:
            self._stopping = self._draining = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- the engine thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._tickets or self._stopping):
                    self._wake.wait()
            if self._stopping:
                break
            self._admit()
            self._expire()
            if self.llm.engine.has_work:
                self._step()
        for ticket in [*self._inbox, *self._tickets]:
            self._drop(ticket, "cancelled", DrainingError("the server has shut down"))

    def _admit(self) -> None:
        while self._inbox:
            ticket = self._inbox.popleft()
            self._tickets.append(ticket)
            self._observer.queued(ticket.requests)
            if ticket.cancelled:
                self._drop(ticket, "cancelled")
                continue
            try:
                self.llm.enqueue(ticket.requests)
            except CacheMemoryError as error:
                self._drop(ticket, "error", error)

    def _expire(self) -> None:
        now = time.perf_counter()
        for ticket in list(self._tickets):
            if ticket.cancelled:
                self._drop(ticket, "cancelled")
            elif ticket.deadline is not None and now > ticket.deadline:
                self._drop(ticket, "deadline", DeadlineError(ticket.own_deadline))

    def _step(self) -> None:
        try:
            advanced = self.llm.step()
        except Exception as error:
            self._recover(error)
            return
        self._observer.stepped(self.llm, advanced)
        for ticket in list(self._tickets):
            self._publish(ticket)

    def _publish(self, ticket: Ticket) -> None:
        events = []
        for request in ticket.requests:
            while request.events:
                events.append(request.events.popleft())
        if not events:
            return
        done = {id(event.completion) for event in events if event.completion is not None}
        for request in ticket.requests:
            completion = request.completion
            if completion is not None and id(completion) in done:
                self._observer.finished(request, completion.finish_reason)
                seconds = completion.stats.decode_seconds
                self._request_seconds += 0.1 * (seconds - self._request_seconds)
        ticket.deliver(events)
        if not ticket.open:
            self._tickets.remove(ticket)
            self.llm.release(ticket.requests)

    def _drop(self, ticket: Ticket, outcome: str, error: Exception | None = None) -> None:
        """A ticket ends before its requests do."""
        for request in ticket.open:
            self._observer.finished(request, outcome)
        self.llm.release(ticket.requests)
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        ticket.deliver(error or EngineError("cancelled"))

    def _recover(self, error: Exception) -> None:
        """A step failed. Whoever ran is told; the cache is whole again and others go on."""
        running = {seq.seq_id for seq in self.llm.engine.scheduler.running}
        lost = isinstance(error, EngineLostError)  # the engine has dropped everybody
        if isinstance(error, CacheMemoryError):
            shown: Exception = error
        else:
            log.exception("a step of the engine failed", exc_info=error)
            shown = EngineError("the engine failed on this request; see the server's log")
        for ticket in list(self._tickets):
            if lost or any(request.seq.seq_id in running for request in ticket.open):
                self._drop(ticket, "error", shown)
