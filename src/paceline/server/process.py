"""The engine's process, as its parent, the HTTP process, sees it.

The HTTP process is the one that was started: it is small, holds the clients and hears the signals.
The engine is its child, joined to it by one end of a socket pair, which has no name and no port.
Whichever ends, the kernel closes its end, and the other one notices.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from paceline.cli.output import quiet_libraries
from paceline.errors import ConfigError, EngineLostError, PacelineError
from paceline.server import wire
from paceline.server.client import EngineClient, Limits
from paceline.server.failures import busy, engine_lost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.server.config import ServeConfig

# The folder that it is started in must not lend it modules.
_START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from paceline.server.child import main; main(int(sys.argv[1]))"
)
_END_SECONDS = 5.0
# Bytes that an engine process may leave unread before new requests are refused.
MAX_UNSENT = 64 * 2**20
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
    """Started at once, and loading. When ``close`` returns, the process has ended."""

    def __init__(self, config: ServeConfig) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs, _signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with suppress(OSError):  # if it has ended already, ``hello`` says so
            self.connection.sendall(wire.framed(wire.LoadModel(config)))

    def hello(self) -> wire.Facts:
        """Wait until it has loaded. Raises its errors, and EngineLostError if it just ends."""
        body = wire.read_message(self.connection)
        if body is None:
            raise EngineLostError(f"the engine process {self.ended()} while it was loading")
        message = wire.REPLIES.decode(body)
        if isinstance(message, wire.Failed):
            raise PacelineError(message.reason)
        assert isinstance(message, wire.Hello)
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

    def close(self) -> None:
        """Close the connection, which ends it, and wait until it is gone."""
        self.connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RemoteEngine(EngineClient):
    """Messages go through the socket of an ``EngineProcess`` that has said hello."""

    def __init__(
        self, process: EngineProcess, facts: wire.Facts, limits: Limits | None = None
    ) -> None:
        super().__init__(facts, limits)
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection)
        self._reading = asyncio.create_task(self._read(reader))
        self._started = True

    def _post(self, message: wire.WireMessage) -> None:
        if self._writer is None or self._writer.is_closing():
            raise engine_lost()
        try:
            data = wire.framed(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"the request cannot be read: {error}") from None
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            raise busy("the engine does not take requests; try again in 5 s", 5)
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the engine's process has ended, or is about to."""
        try:
            while (body := await wire.next_message(reader)) is not None:
                self.receive(wire.REPLIES.decode(body))
        finally:
            self._started = False
            if not self._stopped:
                self._fail_all(engine_lost())
                self.lose(f"its process {await asyncio.to_thread(self._process.ended)}")

    async def _shut(self) -> None:
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._process.close)


def load_tokenizer_alone(config: ServeConfig) -> PreTrainedTokenizerFast:
    """The same tokenizer as the model's, without torch: in a second, and in a tenth of the memory.

    Raises ModelLoadError.
    """
    from paceline.model.gguf import gguf_file
    from paceline.model.names import resolve

    # (Of a GGUF file transformers reads a tokenizer only where there is a torch.)
    if "torch" not in sys.modules and gguf_file(resolve(config.model)) is None:
        # transformers imports torch wherever it finds it, though its tokenizers have no use for it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    quiet_libraries()
    from paceline.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)
