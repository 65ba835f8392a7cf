"""What handlers hold of the engine, wherever it is, and of their requests.

    handler                     event loop                        engine (see wire.py)
    ticket = await submit() --> Submit -------------------------> loop.py
    await ticket.next() <--------- one wake-up a step <---- StepEvents

Everything here runs on the event loop's thread. A ticket that nobody reads any more (its client has
gone) is cancelled, and its cache blocks are free again after the step that runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.server.failures import (
    BusyError,
    DeadlineError,
    DrainingError,
    GoneError,
    SlowReaderError,
)
from paceline.server.wire import (
    Accepted,
    Cancel,
    Ended,
    Facts,
    Lost,
    Scrape,
    Scraped,
    StepEvents,
    Submit,
    WireMessage,
)

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.request.completion import Completion, StreamEvent

log = logging.getLogger("paceline.server")

# Tokens of a ticket that may wait to be read: a client that reads has a handful.
MAX_UNREAD = 65_536
SCRAPE_SECONDS = 5.0


@dataclass(frozen=True)
class Load:
    """What is under way: HTTP requests and their sequences, and how many of these are taken."""

    requests: int
    sequences: int
    capacity: int


@dataclass(frozen=True)
class Limits:
    """``max_queue``: requests that may wait beside those that run; ``deadline`` seconds a request
    may take from its arrival, None for no limit."""

    max_queue: int = 64
    deadline: float | None = 600.0


class Ticket:
    """What a handler holds of its requests, whose events it asks for; ``cancel`` is free."""

    def __init__(
        self,
        client: EngineClient,
        number: int,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        drafter: str,
    ) -> None:
        self.number, self.params, self.drafter = number, params, drafter
        self.count = count = len(prompts) * params.n
        self.prompt_tokens = sum(map(len, prompts))
        self.written = 0  # tokens so far
        self.done: list[Completion] = []
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = count  # sequences that are not complete
        self.error: Exception | None = None  # what ended it
        self._client = client
        self._events: list[StreamEvent] = []
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Its sequences leave before the next step; a finished one is let go."""
        self._client.dismiss(self)

    async def next(self) -> list[StreamEvent]:
        """All that has come since the last call; nothing once it is complete.

        Raises the APIError that ended it.
        """
        while not self._events:
            if self.error is not None:
                raise self.error
            if not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events, self._unread = self._events, [], 0
        return events

    # -- called by the client ------------------------------------------------------------------

    def give_up_in(self, seconds: float, by_request: bool) -> None:
        """Its deadline, which holds whatever the engine does."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._give_up, DeadlineError(by_request), "deadline")

    def _give_up(self, error: Exception, outcome: str = "cancelled") -> None:
        self.fail(error)
        self._client.dismiss(self, outcome)

    def add(self, event: StreamEvent) -> None:
        """Without waking the handler."""
        count = len(event.token_ids)
        if event.completion is not None:
            self.open -= 1
            self.done.append(event.completion)
            self.written += count or len(event.completion.token_ids)
        else:
            self.written += count
        self._unread += count
        self._events.append(event)
        if self._unread > MAX_UNREAD:
            log.warning("an answer is not read: its request has been cancelled")
            self._events.clear()
            self._give_up(SlowReaderError())

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """The end, after what has come."""
        if self.error is None:
            self.error = error
        if not self.accepted.done():
            self.accepted.set_result(None)  # ``submit`` looks for the error
        self.wake()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EngineClient(ABC):
    """An engine as handlers see it; ``facts`` is all that they know of it."""

    def __init__(self, facts: Facts, limits: Limits | None = None) -> None:
        self.facts, self.limits = facts, limits or Limits()
        self.failure: str | None = None  # why there is no engine any more
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._scrapes: dict[int, asyncio.Future[str]] = {}
        self._draining = self._started = self._stopped = False
        self._request_seconds = 1.0  # moving average, for Retry-After

    # -- for handlers ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Takes new requests."""
        return self.alive and not self._draining

    @property
    def alive(self) -> bool:
        return self._started and not self._stopped and self.failure is None

    @property
    def idle(self) -> bool:
        return not self._tickets

    @property
    def load(self) -> Load:
        """Known here, without asking the engine: balancers ask often, and when it is busy."""
        tickets = self._tickets.values()
        capacity = self.facts.max_batch_size + self.limits.max_queue
        return Load(len(tickets), sum(ticket.open for ticket in tickets), capacity)

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        deadline: float | None = None,
        streams: bool = True,
    ) -> Ticket:
        """Queue ``n`` requests for each prompt.

        ``deadline`` in seconds shortens the server's own. ``streams`` asks for events step by step;
        else there is one for each completion. Raises BusyError, DrainingError, GoneError,
        ConfigError, or what the engine refuses it for; what fails later is raised by the ticket.
        """
        if self._draining or self._stopped:
            raise DrainingError("the server is shutting down; send the request elsewhere")
        if not self.alive:
            raise GoneError
        limits = [limit for limit in (deadline, self.limits.deadline) if limit is not None]
        seconds = min(limits, default=None)
        by_request = deadline is not None and seconds == deadline
        drafters = self.facts.drafters
        drafter = params.drafter or (drafters[0] if drafters else "none")
        ticket = Ticket(self, next(self._numbers), prompts, params, drafter)
        self._check_capacity(ticket.count)
        self._post(Submit(ticket.number, list(prompts), params, streams))
        self._tickets[ticket.number] = ticket
        if seconds is not None:
            ticket.give_up_in(seconds, by_request)
        try:
            await ticket.accepted
            if ticket.error is not None:
                raise ticket.error
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def _check_capacity(self, count: int) -> None:
        """Raises BusyError, and ConfigError for more sequences than can ever wait together."""
        load, batch = self.load, self.facts.max_batch_size
        if count > load.capacity:
            raise ConfigError(
                f"n: {count} sequences in one request, but this server takes {load.capacity} at a "
                "time (max_queue and max_batch_size); send fewer prompts, or a smaller n"
            )
        if load.sequences + count > load.capacity:
            waiting, running = max(0, load.sequences - batch), min(load.sequences, batch)
            seconds = max(1, round(self._request_seconds * (1 + waiting) / max(1, running)))
            raise BusyError(
                f"the queue is full ({waiting} requests wait, {self.limits.max_queue} may); "
                f"try again in {seconds} s",
                seconds,
            )

    def dismiss(self, ticket: Ticket, outcome: str = "cancelled") -> None:
        """Nobody reads this ticket any more."""
        ticket.stop_timer()
        if self._tickets.pop(ticket.number, None) is not None and self.alive:
            self._post(Cancel(ticket.number, outcome))

    async def scrape(self) -> str:
        """The metrics, rendered. Raises GoneError, or TimeoutError if the engine says nothing."""
        if not self.alive:
            raise GoneError
        number = next(self._numbers)
        future = self._scrapes[number] = asyncio.get_running_loop().create_future()
        try:
            self._post(Scrape(number))
            return await asyncio.wait_for(future, SCRAPE_SECONDS)
        finally:
            self._scrapes.pop(number, None)

    def drain(self) -> None:
        """Take no new requests; those accepted are finished."""
        self._draining = True

    async def stop(self) -> None:
        """End the engine; what is unfinished is told so."""
        self._draining = self._stopped = True
        self._fail_all(DrainingError("the server has shut down"))
        await self._shut()

    # -- from the engine -------------------------------------------------------------------------

    def receive(self, message: WireMessage) -> None:
        if isinstance(message, StepEvents):
            self._deliver(message.events)
        elif isinstance(message, Accepted):
            ticket = self._tickets.get(message.ticket)
            if ticket is not None and not ticket.accepted.done():
                ticket.accepted.set_result(None)
        elif isinstance(message, Ended):
            ticket = self._tickets.pop(message.ticket, None)
            if ticket is not None:
                ticket.stop_timer()
                ticket.fail(message.fault.error())
        elif isinstance(message, Scraped):
            future = self._scrapes.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.text)
        elif isinstance(message, Lost):
            self.lose(message.reason)

    def _deliver(self, events: Sequence[tuple[int, StreamEvent]]) -> None:
        touched: dict[int, Ticket] = {}
        for number, event in events:
            ticket = self._tickets.get(number)
            if ticket is not None:  # else it was cancelled meanwhile
                ticket.add(event)
                touched[number] = ticket
                if event.completion is not None:
                    seconds = event.completion.stats.decode_seconds
                    self._request_seconds += 0.1 * (seconds - self._request_seconds)
        for ticket in touched.values():
            ticket.wake()
            if not ticket.open:
                ticket.stop_timer()
                self._tickets.pop(ticket.number, None)

    def lose(self, reason: str) -> None:
        """There is no engine any more."""
        if self.failure is None and not self._stopped:
            self.failure = reason
            self._fail_all(GoneError())

    def _fail_all(self, error: Exception) -> None:
        tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            ticket.stop_timer()
            ticket.fail(error)
        for future in self._scrapes.values():
            if not future.done():
                future.set_exception(error)

    # -- transports ------------------------------------------------------------------------------

    @abstractmethod
    async def start(self) -> None:
        """On the event loop that everything else will be called on."""

    @abstractmethod
    def _post(self, message: WireMessage) -> None:
        """Send a message to the engine. Raises ConfigError if it cannot be said."""

    @abstractmethod
    async def _shut(self) -> None:
        """Let the engine end, and wait for it."""
