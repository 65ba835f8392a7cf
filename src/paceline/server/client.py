"""The HTTP side of the connection to the engine. All of it runs on the event loop's thread.

    handler                     event loop                        engine (see wire.py)
    ticket = await submit() --> Submit ---- a socket -----------> loop.py
    await ticket.next() <--------- one wake-up per step <-- StepEvents

When an HTTP client disconnects its ticket is cancelled; the cache blocks are freed after the
current step."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from paceline.core import children
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, EngineLostError, PacelineError
from paceline.request.completion import StreamEvent
from paceline.server import failures, wire
from paceline.server.config import ServeConfig

SCRAPE_SECONDS = 5.0


class EngineEndpoint(Protocol):
    """An engine in its own process or on a thread of this one."""

    facts: wire.Facts

    def start(self) -> socket.socket:
        """Return the connection to the engine, which answers on it from now on."""

    def exit_reason(self) -> str:
        """How the engine ended, as a verb phrase; called once the connection is closed."""

    def close(self) -> None:
        """End the engine and wait for its end."""


class EngineProcess:
    """An engine process, which loads at once; ``wait_until_loaded`` sets ``facts``. When either
    process ends, the other sees the connection close."""

    facts: wire.Facts

    def __init__(self, config: ServeConfig) -> None:
        self.connection, child_end = socket.socketpair()
        with child_end:
            self._process = children.start(
                *("paceline.server.local", str(child_end.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
            )
        with suppress(OSError):  # ``wait_until_loaded`` reports a process that has ended
            self.connection.sendall(wire.encode_message(config))

    def wait_until_loaded(self) -> None:
        """Raises PacelineError if loading fails, EngineLostError if the process ends."""
        body = wire.read_message(self.connection)
        if body is None:
            raise EngineLostError(f"the engine process {self.exit_reason()} while it was loading")
        message = wire.REPLIES.decode(body)
        if isinstance(message, wire.Lost):
            raise PacelineError(message.reason)
        assert isinstance(message, wire.Hello)
        self.facts = message.facts

    def start(self) -> socket.socket:
        return self.connection

    def exit_reason(self) -> str:
        try:
            return children.exit_reason(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            return "has closed its connection"

    def close(self) -> None:
        self.connection.close()  # which ends the process
        children.wait_or_kill(self._process)


class Ticket:
    """The requests that one handler submitted; ``next`` returns their events."""

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
        self.output_tokens = 0  # so far
        self.unfinished = len(prompts) * params.n  # sequences
        self.error: Exception | None = None  # raised by ``next`` after the last event
        self.timer: asyncio.TimerHandle | None = None
        self.dropped: asyncio.Future[str] | None = None  # done once a cancelled ticket has ended
        self._client = client
        self._events: list[StreamEvent] = []
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Drop the sequences before the next step. A finished ticket is left alone."""
        self._client.cancel(self.number)

    async def next(self) -> list[StreamEvent]:
        """Wait for new events; [] once all are complete. Raises the error that ended the ticket."""
        while self.unfinished and not self._events:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        return events

    # -- called by EngineClient ----------------------------------------------------------------

    def add(self, event: StreamEvent) -> None:
        """Add an event. The handler wakes up after all events of a step have been added."""
        if event.completion is not None:
            self.unfinished -= 1
        self.output_tokens += len(event.token_ids)
        self._events.append(event)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Have ``next`` raise ``error`` once the events received so far have been read."""
        self.error = self.error or error
        self._changed.set()


class EngineClient:
    """Sends requests of HTTP handlers, which know only ``facts``, and distributes the events."""

    def __init__(self, engine: EngineEndpoint, config: ServeConfig) -> None:
        self.engine, self.facts, self.config = engine, engine.facts, config
        self.failure: str | None = None  # why the engine failed
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[str]] = {}  # awaited, by message number
        self._draining = self._started = self._stopped = False
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None

    # -- for handlers ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.alive and not self._draining

    @property
    def alive(self) -> bool:
        return self._started and not self._stopped and self.failure is None

    @property
    def idle(self) -> bool:
        return not self._tickets

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of HTTP requests and of their sequences, and the most sequences accepted at once;
        known without asking the engine, because load balancers poll them often."""
        tickets = self._tickets.values()
        capacity = self.facts.max_batch_size + self.config.max_queue
        return len(tickets), sum(ticket.unfinished for ticket in tickets), capacity

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        deadline: float | None = None,
        streams: bool = True,
    ) -> Ticket:
        """Queue ``params.n`` requests for each prompt. ``deadline`` is in seconds; the server's own
        deadline holds besides. With ``streams`` there is an event per step, else per completion.
        Raises APIError and ConfigError, also of the engine; the ticket raises later failures."""
        if self._draining or self._stopped:
            raise failures.shutting_down("the server is shutting down; send the request elsewhere")
        number = next(self._numbers)
        ticket = Ticket(self, number, prompts, params)
        self._check_capacity(ticket.unfinished)
        self._tickets[number] = ticket
        limits = [limit for limit in (deadline, self.config.deadline) if limit]
        if limits:
            error = failures.deadline_exceeded(by_request=min(limits) == deadline)
            event_loop = asyncio.get_running_loop()
            ticket.timer = event_loop.call_later(min(limits), self.cancel, number, error)
        try:
            await self._call(wire.Submit(number, list(prompts), params, streams))
        except Exception:  # the engine refused the requests and has forgotten them
            self._remove(number)
            raise
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def _check_capacity(self, count: int) -> None:
        """Raise APIError if there is no room for ``count`` sequences now, ConfigError if never."""
        _, sequences, capacity = self.load
        if count > capacity:
            raise ConfigError(
                f"n: the request asks for {count} sequences, but this server accepts "
                f"{capacity} at a time (max_queue plus max_batch_size); send fewer prompts or "
                "a smaller n"
            )
        if sequences + count > capacity:
            raise failures.queue_full()

    def cancel(self, number: int, missed: failures.APIError | None = None) -> None:
        """Cancel a ticket, unless it is finished; ``missed`` is the error if it missed a deadline.
        The engine may have ended."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        if missed is not None:
            self._fail(number, missed)
        self._remove(number)
        with suppress(failures.APIError):
            self._send(wire.Cancel(number, "cancelled" if missed is None else "deadline"))
            future = asyncio.get_running_loop().create_future()
            ticket.dropped = self._replies.setdefault(number, future)
            ticket.dropped.add_done_callback(partial(self._dropped, ticket))

    def _dropped(self, ticket: Ticket, reply: asyncio.Future[str]) -> None:
        self._replies.pop(ticket.number, None)
        if reply.exception() is None and reply.result():
            ticket.output_tokens = int(reply.result())

    def _remove(self, number: int) -> Ticket | None:
        """Remove a ticket, which then gets no more events."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None and ticket.timer is not None:
            ticket.timer.cancel()
        return ticket

    async def scrape(self) -> str:
        """Fetch the metrics as text. Raises APIError, and TimeoutError if there is no reply."""
        return await self._call(wire.Scrape(next(self._numbers)), SCRAPE_SECONDS)

    async def set_adapter(self, name: str, folder: str | None) -> None:
        """Load an adapter, or unload it if ``folder`` is None. Raises APIError."""
        await self._call(wire.SetAdapter(next(self._numbers), name, folder))

    async def _call(
        self, message: wire.Submit | wire.Scrape | wire.SetAdapter, timeout: float | None = None
    ) -> str:
        """Send a message and wait for its reply."""
        if not self.alive:
            raise failures.engine_lost()
        future = self._replies[message.number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await asyncio.wait_for(future, timeout)
        finally:
            del self._replies[message.number]

    def drain(self) -> None:
        """Refuse new requests from now on; running ones continue."""
        self._draining = True

    async def stop(self) -> None:
        """End the engine; unfinished requests fail with an error."""
        self._draining = self._stopped = True
        self._fail_all(failures.shutting_down("the server has shut down"))
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self.engine.close)

    # -- messages from the engine ----------------------------------------------------------------

    def _receive(self, message: wire.WireMessage) -> None:
        if isinstance(message, wire.StepEvents):
            for number, event in message.events:
                ticket = self._tickets.get(number)
                if ticket is None:  # cancelled in the meantime
                    continue
                ticket.add(event)
                if not ticket.unfinished:
                    self._remove(number)
        elif isinstance(message, wire.Done):
            future = self._replies.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.text)
        elif isinstance(message, wire.Ended):
            self._fail(message.number, message.error)
        elif isinstance(message, wire.Lost):
            self._engine_failed(message.reason)

    def _engine_failed(self, reason: str) -> None:
        """Fail all requests, unless the engine ended because this server stopped it."""
        if self.failure is None and not self._stopped:
            self.failure = reason
            self._fail_all(failures.engine_lost())

    def _fail(self, number: int, error: Exception) -> None:
        """End the awaited reply, or the ticket, that has this number."""
        future, ticket = self._replies.get(number), self._remove(number)
        if future is not None and not future.done():
            future.set_exception(error)
        if ticket is not None:
            ticket.fail(error)

    def _fail_all(self, error: Exception) -> None:
        for number in {*self._tickets, *self._replies}:
            self._fail(number, error)

    # -- the connection --------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the engine; called on the event loop."""
        stream, self._writer = await asyncio.open_unix_connection(sock=self.engine.start())
        self._reader = asyncio.create_task(self._read(stream))
        self._started = True

    def _send(self, message: wire.WireMessage) -> None:
        """Raises ConfigError if the message cannot be encoded, APIError without an engine."""
        if self._writer is None or self._writer.is_closing():
            raise failures.engine_lost()
        try:
            data = wire.encode_message(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"the request cannot be encoded: {error}") from None
        self._writer.write(data)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Handle messages until the engine ends."""
        try:
            while (body := await wire.read_message_async(stream)) is not None:
                self._receive(wire.REPLIES.decode(body))
        finally:
            self._started = False
            if not self._stopped:
                self._fail_all(failures.engine_lost())
                reason = await asyncio.to_thread(self.engine.exit_reason)
                self._engine_failed(f"its process {reason}")
