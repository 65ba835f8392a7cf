"""One engine for callers on any thread and in any event loop.

    a caller that is alone     takes the steps itself, on its own thread
    several at the same time   the engine's thread takes the steps for all, and wakes each caller
                               when its own requests have got what it waits for

Only the holder of one lock touches the engine. Other threads put what they want (a request queued
or dropped) into an inbox, which is read between two steps; they do not wait for that. Steps are
taken only while somebody waits for one.
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

_IDLE_SECONDS = 1.0  # then the engine's thread ends and callers take the steps
_EXIT_SECONDS = 10.0  # for the last step when the interpreter exits


def _closed() -> PacelineError:
    return PacelineError("this LLM has been closed; make another one")


@dataclass
class Waiter:
    """A caller waiting until ``done()``; ``error``: why nothing more will come."""

    done: Callable[[], bool]
    wake: Callable[[], object]
    error: PacelineError | None = None


class EngineOwner:
    """An engine, its requests, and who takes its steps. All methods may be called on any thread."""

    def __init__(self, engine: Engine, on_close: Callable[[], None] = lambda: None) -> None:
        """``on_close`` is called once nothing uses the engine any more."""
        self.requests: dict[int, Request] = {}  # by sequence
        self._engine: Engine | None = engine
        self._on_close = on_close
        self._lock = threading.Lock()  # only its holder uses the engine
        self._holder: int | None = None  # thread of the holder
        self._inbox: deque[Callable[[Engine], None]] = deque()  # in order
        self._waiters: dict[int, Waiter] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # for beginning and ending the thread
        self._work = threading.Event()
        self._closing = self._exiting = False
        _LIVE.add(self)

    @property
    def engine(self) -> Engine:
        """Raises PacelineError after ``close``."""
        if self._engine is None or self._closing:
            raise _closed()
        return self._engine

    # -- what callers want of it -----------------------------------------------------------------

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue all, or none if one is refused (CacheMemoryError); a set ``queued`` time stays."""
        for request in requests:
            self.engine.scheduler.check(request.seq)
        now = time.perf_counter()
        for request in requests:
            request.seq.queued = request.seq.queued or now
            self._inbox.append(partial(self._add, request))
        self._tidy()

    def release(self, requests: Iterable[Request]) -> None:
        """Forget requests; unfinished ones are cancelled and their cache blocks freed."""
        for request in requests:
            self._inbox.append(partial(self._drop, request))
        self._tidy()

    def abort(self, requests: Iterable[Request]) -> None:
        """End unfinished requests with what they have; ``finish_reason`` is "abort"."""
        for request in requests:
            self._inbox.append(partial(self._end, request))
        self._tidy()

    def close(self) -> None:
        """Drop everything; who waits gets a PacelineError. Waits for the step under way, unless
        called in that step: the engine is then dropped after it."""
        self._closing = True
        if self._holder != threading.get_ident():
            with self._locked():
                self._settle()
        self._work.set()

    def _add(self, request: Request, engine: Engine) -> None:
        moment = request.seq.queued
        try:
            engine.add(request.seq)
        except CacheMemoryError as error:  # checked before, but the cache has changed
            request.fail(str(error))
            return
        request.seq.queued = moment
        self.requests[request.seq.seq_id] = request

    def _drop(self, request: Request, engine: Engine) -> None:
        if request.completion is None:
            engine.abort(request.seq.seq_id)
        self.requests.pop(request.seq.seq_id, None)

    def _end(self, request: Request, engine: Engine) -> None:
        seq_id = request.seq.seq_id
        left = [commit for commit in engine.ready if commit.seq_id == seq_id]
        for commit in (*left, Commit(seq_id, (), finish_reason="abort")):
            if request.completion is None:
                request.absorb(commit)
        engine.abort(seq_id)

    # -- taking steps ----------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, Commit]]:
        """One step, for a caller that takes all steps. Raises EngineLostError if the engine cannot
        go on, PacelineError after ``close``."""
        with self._locked():
            advanced = self._step()
        self._tidy()
        return advanced

    def until(self, done: Callable[[], bool]) -> None:
        """Return once ``done()``: take steps, or wait for them if other callers wait, too. Raises
        EngineLostError if the engine cannot go on, PacelineError after ``close``."""
        try:
            with self._locked(wait=False) as locked:
                while locked and self._thread is None and not done() and not self._waiters:
                    self._step()
        finally:
            self._tidy()
        if done():
            return
        ready = threading.Event()
        with self.waiting(done, ready.set):
            ready.wait()

    @contextmanager
    def waiting(self, done: Callable[[], bool], wake: Callable[[], object]) -> Iterator[None]:
        """Have steps taken meanwhile; the engine's thread calls ``wake`` once ``done()``. Raises at
        the end what ``until`` does."""
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
        self._settle()
        engine = self.engine
        if not engine.has_work:  # these would wait for ever
            for request in self.requests.values():
                request.fail("the engine has dropped this request")
        return advance(engine, self.requests)

    @contextmanager
    def _locked(self, wait: bool = True) -> Iterator[bool]:
        """Hold the engine's lock; yields whether it was to be had."""
        locked = self._lock.acquire(blocking=wait)
        try:
            if locked:
                self._holder = threading.get_ident()
            yield locked
        finally:
            if locked:
                self._holder = None
                self._lock.release()

    def _tidy(self) -> None:
        """Empty the inbox, unless another thread holds the engine: that one does it then."""
        while self._inbox or (self._closing and self._engine is not None):
            with self._locked(wait=False) as locked:
                if not locked:
                    return
                self._settle()

    def _settle(self) -> None:
        """Empty the inbox; called by the lock's holder, between two steps."""
        engine = self._engine
        while self._inbox:
            wanted = self._inbox.popleft()
            if engine is not None:
                wanted(engine)
        if self._closing and engine is not None:
            for request in list(self.requests.values()):
                self._drop(request, engine)
            self._engine = None
            self._on_close()

    # -- the engine's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            if self._waiters and not self._exiting:
                with self._locked():
                    self._serve_waiters()
                self._tidy()
            idle = not self._work.wait(_IDLE_SECONDS)
            self._work.clear()
            if idle or self._exiting:
                with self._starting:
                    if self._exiting or not self._waiters:
                        self._thread = None
                        return

    def _serve_waiters(self) -> None:
        """Until nobody waits any more."""
        while not self._exiting:
            for key, waiter in self._waiters.copy().items():
                if waiter.done():
                    self._wake(key, waiter)
            if not self._waiters:
                return
            try:
                self._step()
            except BaseException as error:  # raised in each caller
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
    """Wait for steps under way before the interpreter is torn down."""
    for owner in list(_LIVE):
        owner._exit()
