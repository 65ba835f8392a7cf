"""Starts and stops the engine process from its parent, the HTTP process.

The HTTP process starts first, stays small, holds the client connections and handles signals. The
engine process is its child, connected by a socket pair; when either process ends, the other sees
the connection close."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.core import children
from paceline.core.libraries import quiet_libraries
from paceline.errors import EngineLostError, PacelineError
from paceline.server import wire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from paceline.server.config import ServeConfig


class EngineProcess:
    """An engine process, which loads at once; ``wait_until_loaded`` sets ``facts``."""

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
        """Close the connection, which ends the process, and wait for its end."""
        self.connection.close()
        children.wait_or_kill(self._process)


def load_tokenizer_alone(config: ServeConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer without torch, in a tenth of the memory. Raises ModelLoadError."""
    from paceline.model.gguf import gguf_file
    from paceline.model.names import resolve

    # transformers imports torch wherever it is installed, but its tokenizers need it only to read
    # a GGUF file.
    if "torch" not in sys.modules and gguf_file(resolve(config.model)) is None:
        sys.modules["torch"] = None  # type: ignore[assignment]
    quiet_libraries()
    from paceline.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)
