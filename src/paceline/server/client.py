"""The engine and its requests as HTTP handlers see them; all of it runs on the event loop's thread.

    handler                     event loop                        engine (see wire.py)
    ticket = await submit() --> Submit ---- a socket -----------> loop.py
    await ticket.next() <--------- one wake-up a step <---- StepEvents

A ticket whose client has gone is cancelled; its cache blocks are free after the step under way.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.errors import ConfigError
from paceline.server import wire
from paceline.server.failures import APIError, busy, draining, engine_lost, too_late

if TYPE_CHECKING:
    from paceline.core.params import SamplingParams
    from paceline.request.completion import Completion, StreamEvent
    from paceline.server.config import ServeConfig

SCRAPE_SECONDS = 5.0
# Unread bytes from which new requests are refused.
MAX_UNSENT = 64 * 2**20


class EngineEndpoint(Protocol):
    """An engine at the other end of a connection, in its own process or on a thread."""

    facts: wire.Facts

    def start(self) -> socket.socket:
        """The connection, on which it answers from now on."""

    def ended(self) -> str:
        """How it ended, in words, once the connection is closed."""

    def close(self) -> None:
        """End it and wait for that. The connection has been closed."""


@dataclass(frozen=True)
class Load:
    """HTTP requests under way, their sequences, and how many sequences are accepted."""

    requests: int
    sequences: int
    capacity: int


class Ticket:
    """A handler's requests; ``next`` gives their events."""

    def __init__(
        self,
        client: EngineClient,
        number: int,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self.number, self.params = number, params
        self.drafter = params.drafter or next(iter(client.facts.drafters), "none")
        self.prompt_tokens = sum(map(len, prompts))
        self.written = 0  # tokens so far
        self.done: list[Completion] = []
        self.open = len(prompts) * params.n  # sequences that are not complete
        self.error: Exception | None = None  # what ended it
        self.timer: asyncio.TimerHandle | None = None
        self._client = client
        self._events: list[StreamEvent] = []
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Its sequences leave before the next step; does nothing for a finished one."""
        self._client.dismiss(self.number)

    async def next(self) -> list[StreamEvent]:
        """The events since the last call; [] once complete. Raises the APIError that ended it."""
        while self.open and not self._events:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        return events

    # -- called by the client ------------------------------------------------------------------

    def add(self, event: StreamEvent) -> None:
        """The handler runs once all events of a step have been added."""
        if event.completion is not None:
            self.open -= 1
            self.done.append(event.completion)
        self.written += len(event.token_ids or (event.completion or event).token_ids)
        self._events.append(event)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End it after the events that have come."""
        self.error = self.error or error
        self._changed.set()


class EngineClient:
    """An engine as handlers see it; ``facts`` is all that they know of it."""

    def __init__(self, engine: EngineEndpoint, config: ServeConfig) -> None:
        self.engine, self.facts, self.config = engine, engine.facts, config
        self.failure: str | None = None  # why the engine ended
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str]] = {}  # that are waited for
        self._draining = self._started = self._stopped = False
        self._request_seconds = 1.0  # moving average, for Retry-After
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    # -- for handlers ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Accepts new requests."""
        return self.alive and not self._draining

    @property
    def alive(self) -> bool:
        return self._started and not self._stopped and self.failure is None

    @property
    def idle(self) -> bool:
        return not self._tickets

    @property
    def load(self) -> Load:
        """Known without asking the engine: load balancers ask often, also when it is busy."""
        tickets = self._tickets.values()
        capacity = self.facts.max_batch_size + self.config.max_queue
        return Load(len(tickets), sum(ticket.open for ticket in tickets), capacity)

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        deadline: float | None = None,
        streams: bool = True,
    ) -> Ticket:
        """Queue ``n`` requests for each prompt.

        ``deadline``: seconds, at most the server's. ``streams``: events step by step, else one for
        each completion. Raises APIError, ConfigError, or what the engine refuses it for; later
        failures are raised by the ticket.
        """
        if self._draining or self._stopped:
            raise draining("the server is shutting down; send the request elsewhere")
        number = next(self._numbers)
        ticket = Ticket(self, number, prompts, params)
        self._check_capacity(ticket.open)
        self._tickets[number] = ticket
        limits = [limit for limit in (deadline, self.config.deadline) if limit]
        if limits:
            late = too_late(by_request=min(limits) == deadline)
            events = asyncio.get_running_loop()
            ticket.timer = events.call_later(min(limits), self._expire, number, late)
        try:
            await self._ask(wire.Submit(number, list(prompts), params, streams))
        except Exception:  # refused: the engine does not know it
            self._take(number)
            raise
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def _check_capacity(self, count: int) -> None:
        """Raises APIError, and ConfigError for more sequences than can ever wait together."""
        load, batch = self.load, self.facts.max_batch_size
        if count > load.capacity:
            raise ConfigError(
                f"n: {count} sequences in one request, but this server takes {load.capacity} at a "
                "time (max_queue and max_batch_size); send fewer prompts, or a smaller n"
            )
        if load.sequences + count > load.capacity:
            waiting, running = max(0, load.sequences - batch), min(load.sequences, batch)
            seconds = max(1, round(self._request_seconds * (1 + waiting) / max(1, running)))
            raise busy(
                f"the queue is full ({waiting} requests wait, {self.config.max_queue} may); "
                f"try again in {seconds} s",
                seconds,
            )

    def _expire(self, number: int, late: APIError) -> None:
        self._fail(number, late)
        self._cancel(number, "deadline")

    def dismiss(self, number: int) -> None:
        """Cancel a ticket that nobody reads any more."""
        if self._take(number) is not None:
            self._cancel(number, "cancelled")

    def _cancel(self, number: int, outcome: str) -> None:
        with suppress(APIError):  # the engine has ended
            self._post(wire.Cancel(number, outcome))

    def _take(self, number: int) -> Ticket | None:
        """Remove a ticket; it gets nothing more."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None and ticket.timer is not None:
            ticket.timer.cancel()
        return ticket

    async def scrape(self) -> str:
        """The rendered metrics. Raises APIError, or TimeoutError if the engine does not answer."""
        return await self._ask(wire.Scrape(next(self._numbers)), SCRAPE_SECONDS)

    async def set_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter; without a folder, unload it. Raises APIError."""
        await self._ask(wire.SetAdapter(next(self._numbers), name, folder))

    async def _ask(
        self, message: wire.Submit | wire.Scrape | wire.SetAdapter, seconds: float | None = None
    ) -> str:
        """Send a message and wait for its answer."""
        if not self.alive:
            raise engine_lost()
        future = self._answers[message.number] = asyncio.get_running_loop().create_future()
        try:
            self._post(message)
            return await asyncio.wait_for(future, seconds)
        finally:
            del self._answers[message.number]

    def drain(self) -> None:
        """Accept no new requests; finish the others."""
        self._draining = True

    async def stop(self) -> None:
        """End the engine; unfinished requests fail."""
        self._draining = self._stopped = True
        self._fail_all(draining("the server has shut down"))
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self.engine.close)

    # -- from the engine -------------------------------------------------------------------------

    def receive(self, message: wire.WireMessage) -> None:
        if isinstance(message, wire.StepEvents):
            self._deliver(message.events)
        elif isinstance(message, wire.Done):
            future = self._answers.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.text)
        elif isinstance(message, wire.Ended):
            self._fail(message.number, message.error)
        elif isinstance(message, wire.Lost):
            self.lose(message.reason)

    def _deliver(self, events: Sequence[tuple[int, StreamEvent]]) -> None:
        for number, event in events:
            ticket = self._tickets.get(number)
            if ticket is None:  # cancelled meanwhile
                continue
            ticket.add(event)
            if event.completion is not None:
                seconds = event.completion.stats.decode_seconds
                self._request_seconds += 0.1 * (seconds - self._request_seconds)
            if not ticket.open:
                self._take(number)

    def lose(self, reason: str) -> None:
        """The engine has ended."""
        if self.failure is None and not self._stopped:
            self.failure = reason
            self._fail_all(engine_lost())

    def _fail(self, number: int, error: Exception) -> None:
        """End what has this number, an answer that is waited for or a ticket."""
        future, ticket = self._answers.get(number), self._take(number)
        if future is not None and not future.done():
            future.set_exception(error)
        if ticket is not None:
            ticket.fail(error)

    def _fail_all(self, error: Exception) -> None:
        for number in {*self._tickets, *self._answers}:
            self._fail(number, error)

    # -- the connection --------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect; called on the event loop."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.engine.start())
        self._reading = asyncio.create_task(self._read(reader))
        self._started = True

    def _post(self, message: wire.WireMessage) -> None:
        """Send a message. Raises ConfigError if it cannot be encoded, APIError."""
        if self._writer is None or self._writer.is_closing():
            raise engine_lost()
        try:
            data = wire.encode_message(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"the request cannot be read: {error}") from None
        unsent = self._writer.transport.get_write_buffer_size()
        if isinstance(message, wire.Submit) and unsent > MAX_UNSENT:
            raise busy("the engine does not take requests; try again in 5 s", 5)
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receive until the engine ends."""
        try:
            while (body := await wire.read_message_async(reader)) is not None:
                self.receive(wire.REPLIES.decode(body))
        finally:
            self._started = False
            if not self._stopped:
                self._fail_all(engine_lost())
                self.lose(f"its process {await asyncio.to_thread(self.engine.ended)}")
