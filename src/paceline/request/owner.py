"""Shares one engine among callers on any thread and in any event loop.

    a single caller        runs the steps itself, on its own thread
    concurrent callers     a thread of the owner runs the steps for all, and wakes each caller when
                           its requests have what it waits for

Only the thread that holds the lock touches the engine. Other threads put their commands (add or
drop a request) into an inbox and do not wait; the lock's holder runs these commands between two
steps. Steps run only while a caller waits for one.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from paceline.core.batch import Commit
from paceline.engine.engine import Engine
from paceline.engine.recovery import Failure
from paceline.errors import CacheMemoryError, EngineLostError, PacelineError
from paceline.request.request import Request, advance

_IDLE_SECONDS = 1.0  # the engine's thread ends after this time without callers
_EXIT_SECONDS = 10.0  # how long the interpreter's exit waits for the last step


@dataclass
class Waiter:
    """A caller that waits until ``done()`` is true. ``error``: why that will never be."""

    done: Callable[[], bool]
    wake: Callable[[], object]
    error: PacelineError | None = None


class EngineOwner:
    """Owns an engine and its requests, and decides which thread runs its steps. Thread-safe."""

    def __init__(self, engine: Engine, on_close: Callable[[], None] = lambda: None) -> None:
        """``on_close`` is called once nothing uses the engine any more."""
        self.requests: dict[int, Request] = {}  # by sequence id
        self._engine: Engine | None = engine
        self._on_close = on_close
        self._lock = threading.Lock()  # only its holder uses the engine
        self._holder: int | None = None  # id of the holder's thread
        self._inbox: deque[Callable[[Engine], None]] = deque()  # commands, run in this order
        self._waiters: dict[int, Waiter] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # guards starting and ending the thread
        self._work = threading.Event()
        self._closing = self._exiting = False
        _LIVE.add(self)

    @property
    def engine(self) -> Engine:
        """Raises PacelineError after ``close``."""
        if self._engine is None or self._closing:
            raise PacelineError("this LLM has been closed; make another one")
        return self._engine

    # -- commands of callers ---------------------------------------------------------------------

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue all, or none if one is refused (CacheMemoryError). Keeps a ``queued`` time."""
        for request in requests:
            self.engine.scheduler.check(request.seq)
        now = time.perf_counter()
        for request in requests:
            request.seq.queued = request.seq.queued or now
        self._order(self._add_request, requests)

    def release(self, requests: Iterable[Request]) -> None:
        """Forget requests; unfinished ones are cancelled and their cache blocks freed."""
        self._order(self._drop_request, requests)

    def close(self) -> None:
        """Drop all requests and the engine; callers that wait get a PacelineError. Waits for a
        running step, unless called from within it: the engine is then dropped after it."""
        self._closing = True
        if self._holder != threading.get_ident():
            with self._engine_lock():
                self._run_inbox()
        self._work.set()

    def _order(
        self, command: Callable[[Request, Engine], None], requests: Iterable[Request]
    ) -> None:
        self._inbox.extend(partial(command, request) for request in requests)
        self._try_inbox()

    def _add_request(self, request: Request, engine: Engine) -> None:
        queued = request.seq.queued
        try:
            engine.add(request.seq)
        except CacheMemoryError as error:  # checked in ``enqueue``, but the cache has changed
            request.fail(str(error))
            return
        request.seq.queued = queued
        self.requests[request.seq.seq_id] = request

    def _drop_request(self, request: Request, engine: Engine) -> None:
        if request.completion is None:
            engine.abort(request.seq.seq_id)
        self.requests.pop(request.seq.seq_id, None)

    # -- running steps ---------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, Commit]]:
        """Run one step, for a caller that runs all steps itself. Raises EngineLostError if the
        engine cannot go on, PacelineError after ``close``."""
        with self._engine_lock():
            advanced = self._step()
        self._try_inbox()
        return advanced

    def until(self, done: Callable[[], bool]) -> None:
        """Return once ``done()`` is true. Runs steps here, or waits for the engine's thread if
        other callers wait as well. Raises EngineLostError, and PacelineError after ``close`` or
        from within a step, such as in a logits processor, which would wait for itself."""
        if self._holder == threading.get_ident():
            raise PacelineError("this LLM is called from within its own step; call another one")
        try:
            with self._engine_lock(wait=False) as locked:
                while locked and self._thread is None and not done() and not self._waiters:
                    self._step()
        finally:
            self._try_inbox()
        if done():
            return
        ready = threading.Event()
        with self.waiting(done, ready.set):
            ready.wait()

    @contextmanager
    def waiting(self, done: Callable[[], bool], wake: Callable[[], object]) -> Iterator[None]:
        """Let the engine's thread run steps during the block; it calls ``wake`` once ``done()`` is
        true. Raises the errors of ``until`` at the end of the block."""
        waiter = self._waiters[id(wake)] = Waiter(done, wake)
        try:
            with self._starting:
                if self._thread is None:
                    serve = threading.Thread(target=self._serve, name="paceline-steps", daemon=True)
                    serve.start()
                    self._thread = serve
                self._work.set()
            yield
        finally:
            self._waiters.pop(id(wake), None)
        if waiter.error is not None:
            raise waiter.error

    def _step(self) -> list[tuple[Request, Commit]]:
        self._run_inbox()
        engine = self.engine
        if not engine.has_work:  # requests that the engine does not know would wait for ever
            for request in self.requests.values():
                request.fail("the engine has dropped this request")
        return advance(engine, self.requests)

    @contextmanager
    def _engine_lock(self, wait: bool = True) -> Iterator[bool]:
        """Hold the engine's lock; yields False if, without ``wait``, another thread holds it."""
        locked = self._lock.acquire(blocking=wait)
        try:
            if locked:
                self._holder = threading.get_ident()
            yield locked
        finally:
            if locked:
                self._holder = None
                self._lock.release()

    def _try_inbox(self) -> None:
        """Run the commands of the inbox, unless another thread holds the lock and will do so."""
        while self._inbox or (self._closing and self._engine is not None):
            with self._engine_lock(wait=False) as locked:
                if not locked:
                    return
                self._run_inbox()

    def _run_inbox(self) -> None:
        """Run the commands of the inbox. Called by the lock's holder, between two steps."""
        engine = self._engine
        while self._inbox:
            command = self._inbox.popleft()
            if engine is not None:
                command(engine)
        if self._closing and engine is not None:
            for request in list(self.requests.values()):
                self._drop_request(request, engine)
            self._engine = None
            self._on_close()

    # -- the engine's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            if self._waiters and not self._exiting:
                with self._engine_lock():
                    self._serve_waiters()
                self._try_inbox()
            idle = not self._work.wait(_IDLE_SECONDS)
            self._work.clear()
            if idle or self._exiting:
                with self._starting:
                    if self._exiting or not self._waiters:
                        self._thread = None
                        return

    def _serve_waiters(self) -> None:
        """Run steps until no caller waits any more."""
        while not self._exiting:
            for key, waiter in self._waiters.copy().items():
                if waiter.done():
                    self._wake(key, waiter)
            if not self._waiters:
                return
            try:
                self._step()
            except BaseException as error:  # every waiting caller raises it
                lost = isinstance(error, EngineLostError)
                text = str(error) if isinstance(error, PacelineError) else str(Failure.of(error))
                for key, waiter in self._waiters.copy().items():
                    waiter.error = (EngineLostError if lost else PacelineError)(text)
                    self._wake(key, waiter)

    def _wake(self, key: int, waiter: Waiter) -> None:
        self._waiters.pop(key, None)
        with suppress(RuntimeError):  # the event loop may be closed
            waiter.wake()

    def _exit(self) -> None:
        thread, self._exiting = self._thread, True
        self._work.set()
        if thread is not None:
            thread.join(_EXIT_SECONDS)


_LIVE: WeakSet[EngineOwner] = WeakSet()


@atexit.register
def _exit_all() -> None:
    """Wait for running steps before the interpreter is torn down."""
    for owner in list(_LIVE):
        owner._exit()
