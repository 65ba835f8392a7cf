"""Child processes of this package. A child ends when its connection to the parent closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

_START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; from {} import main; main()"
)
_END_SECONDS = 5.0


def start(module: str, *arguments: str, **pipes: Any) -> subprocess.Popen[Any]:
    """Run ``main`` of a module of this package in a child process. The child imports nothing from
    the working directory and has a session of its own, so that Ctrl-C reaches the parent only.
    ``pipes``: options of Popen."""
    command = [sys.executable, "-c", _START.format(module), *arguments]
    return subprocess.Popen(command, start_new_session=True, **pipes)


def ignore_signals() -> None:
    """In a child, ignore SIGINT and SIGTERM, which supervisors send to all processes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def exit_now(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that may be in a forward."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_or_kill(child: subprocess.Popen[Any]) -> None:
    """Wait for a child whose connection has been closed; kill it after five seconds."""
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def exit_reason(code: int) -> str:
    """Says in words how a process with this return code ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
