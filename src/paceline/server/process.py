"""The engine's process, as its parent, the HTTP process, sees it.

The HTTP process is the one that was started: it is small, holds the clients and hears the signals.
The engine is its child, joined to it by one end of a socket pair, which has no name and no port.
Whichever ends, the kernel closes its end, and the other one notices.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from paceline.errors import EngineLostError, PacelineError
from paceline.server.wire import REPLIES, Facts, Failed, Hello, LoadModel, framed, read_message

if TYPE_CHECKING:
    from paceline.server.config import ServeConfig

# The folder that it is started in must not lend it modules.
_START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from paceline.server.child import main; main(int(sys.argv[1]))"
)
_END_SECONDS = 5.0
_HEARD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is started meanwhile has these blocked until it ignores them: Ctrl-C in a terminal and
    many supervisors reach all processes, but how the server ends is for its parent to say."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineProcess:
    """Started at once, and loading. Use it as a context: when it is left, the process has ended."""

    def __init__(self, config: ServeConfig) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs, _signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid
        with suppress(OSError):  # if it has ended already, ``hello`` says so
            self.connection.sendall(framed(LoadModel(config)))

    def hello(self) -> Facts:
        """Wait until it has loaded. Raises its errors, and EngineLostError if it just ends."""
        body = read_message(self.connection)
        if body is None:
            raise EngineLostError(f"the engine process {self.ended()} while it was loading")
        message = REPLIES.decode(body)
        if isinstance(message, Failed):
            if message.expected:
                raise message.fault.error()
            raise PacelineError(message.fault.message)
        assert isinstance(message, Hello)
        return message.facts

    def ended(self) -> str:
        """How it did, once the connection is closed, in words."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"has ended with exit code {code}"

    def end(self) -> None:
        """Close the connection, which ends it, and wait until it is gone."""
        self.connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
