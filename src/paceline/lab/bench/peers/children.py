"""Processes of other engines: started here, ended here, and nothing else is."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from paceline.lab.bench.peers.kinds import PeerFailedError

_PATIENCE = 10.0  # seconds in which a process that was asked to end may do so


class PeerProcess:
    """One child; what it says on stderr is kept for the one line about its failure."""

    def __init__(self, name: str, command: Sequence[str], talks: bool = False) -> None:
        """``talks``: over stdin and stdout. Raises PeerFailedError if it cannot be started."""
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        pipe = subprocess.PIPE if talks else subprocess.DEVNULL
        out: Any = subprocess.PIPE if talks else self._log
        try:
            self._child = subprocess.Popen(
                list(command), stdin=pipe, stdout=out, stderr=self._log, start_new_session=True
            )
        except OSError as error:
            self._log.close()
            raise PeerFailedError(
                f"{name}: {command[0]} cannot be started ({error.strerror})"
            ) from None

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def write(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode() + b"\n")
        self._child.stdin.flush()

    def readline(self) -> str:
        """The next line that it says; "" when it has ended."""
        assert self._child.stdout is not None
        return self._child.stdout.readline().decode("utf-8", "replace")

    def last_words(self) -> str:
        """The last line of its log that says something, short."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        wrong = [line.strip() for line in lines if "error" in line.lower()]
        said = wrong or [line.strip() for line in lines if line.strip()]
        return said[-1][:200] if said else "it said nothing"

    def close(self) -> None:
        """End it; a second call does nothing."""
        if not self.ended:
            self._child.terminate()
            try:
                self._child.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._log):
            if pipe is not None:
                pipe.close()
