"""The engine's process as its parent, the HTTP process, sees it.

The HTTP process is started first, is small, holds the clients and handles signals. The engine is
its child, connected by a socket pair. If either ends, the other sees the connection close.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.cli.output import quiet_libraries
from paceline.core import children
from paceline.errors import EngineLostError, PacelineError
from paceline.server import wire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.server.config import ServeConfig


class EngineProcess:
    """Starts loading at once; has ``facts`` after ``hello``. ``close`` waits for its end."""

    facts: wire.Facts

    def __init__(self, config: ServeConfig) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = children.start(
                *("paceline.server.child", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with suppress(OSError):  # ``hello`` reports a process that has ended
            self.connection.sendall(wire.encode_message(wire.LoadModel(config)))

    def hello(self) -> None:
        """Wait for the model. Raises its errors, and EngineLostError if the process ends."""
        body = wire.read_message(self.connection)
        if body is None:
            raise EngineLostError(f"the engine process {self.ended()} while it was loading")
        message = wire.REPLIES.decode(body)
        if isinstance(message, wire.Lost):
            raise PacelineError(message.reason)
        assert isinstance(message, wire.Hello)
        self.facts = message.facts

    def start(self) -> socket.socket:
        return self.connection

    def ended(self) -> str:
        try:
            return children.exit_reason(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            return "has closed its connection"

    def close(self) -> None:
        """Close the connection, which ends the process, and wait for that."""
        self.connection.close()
        children.wait_or_kill(self._process)


def load_tokenizer_alone(config: ServeConfig) -> PreTrainedTokenizerFast:
    """The model's tokenizer without torch: in a tenth of the memory. Raises ModelLoadError."""
    from paceline.model.gguf import gguf_file
    from paceline.model.names import resolve

    # (transformers needs torch to read a GGUF file's tokenizer.)
    if "torch" not in sys.modules and gguf_file(resolve(config.model)) is None:
        # transformers imports torch if it can, though its tokenizers do not use it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    quiet_libraries()
    from paceline.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)
